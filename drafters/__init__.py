"""Who proposes: models, lookups, EAGLE and decoding heads behind one small protocol."""
