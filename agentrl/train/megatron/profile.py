"""A trace of one optimizer step: every operator and GPU kernel, with torch's profiler.

rank{r}.json.gz   the trace, for ui.perfetto.dev or chrome://tracing
rank{r}.txt       operators by total time on the GPU (on a CPU: by their own time)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROWS = 60
"""operators in the table"""


@contextmanager
def profiled(folder: Path, rank: int) -> Iterator[None]:
    """Profile the block, and write trace and table into `folder`."""
    gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as trace:
        yield
        if gpu:
            torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    order = "self_cuda_time_total" if gpu else "self_cpu_time_total"
    (folder / f"rank{rank}.txt").write_text(trace.key_averages().table(sort_by=order, row_limit=ROWS))
