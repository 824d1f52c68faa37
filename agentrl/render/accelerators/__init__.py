"""Parts that only save time: each has a plain fallback beside it that gives the same ids, and a row in docs/performance.md."""
