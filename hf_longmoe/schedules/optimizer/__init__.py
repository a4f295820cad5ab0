"""OffloadStreamAdamW: AdamW whose state lives in host memory, stepped as a pipeline of buckets."""
