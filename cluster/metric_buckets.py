"""Upper bounds of the histograms' buckets."""

from __future__ import annotations

# Seconds. vLLM's buckets for TTFT; finer ones for time per token, where objectives are a few milliseconds.
# They reach as far as may be waited, for a cell two minutes and for an answer ten: a quantile beyond the last
# one is shown as that.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160),
)
TPOT_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.3, 1)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
STEP_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
HTTP_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000),
    *(20000, 50000, 100000, 200000),
)
BATCH_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4)
