"""`python -m echo_rank FD PARENT`: a rank that answers every command with its process id, its log's writer and what it was given."""

import os
import sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
print("started", flush=True)
while True:
    try:
        command, arguments = connection.recv()
    except EOFError:
        break
    connection.send(
        ("ok", {"pid": os.getpid(), "parent": os.getppid(), "threads": os.environ["OMP_NUM_THREADS"], **arguments})
    )
