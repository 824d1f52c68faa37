"""Run tests on copies of the source, each in a fork of one process that has imported the packages they need: importing takes longest.

It reads a line of JSON for each job, {"source": folder, "tests": [node ids], "output": file}, and answers with pytest's exit status in a line.
"""

import json
import os
import sys
import traceback

PACKAGES = (
    "pytest pytest_asyncio hypothesis numpy torch pydantic.dataclasses tokenizers jinja2 orjson zstandard httpx aiohttp safetensors PIL.Image "
    "tomli_w"
).split()


def run(source, tests, output):
    """Run pytest in this process, which ends with its exit status."""
    import pytest

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.setpgid(0, 0)
    os.chdir(source)
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = source
    status = 70
    try:
        words = ["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{t}" for t in tests)]
        status = int(pytest.main(words))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main():
    """Serve until the input ends."""
    for name in PACKAGES:
        __import__(name)
    assert not any(name.partition(".")[0] == "agentrl" for name in sys.modules), "the copies would not be imported"
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            run(job["source"], job["tests"], job["output"])
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
