"""Running causal language models over ragged batches: KV slots, attention, sampling, token trees."""
