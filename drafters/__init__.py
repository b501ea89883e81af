"""Who proposes: model drafters and prompt lookup behind one small protocol."""
