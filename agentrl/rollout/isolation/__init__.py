"""User code in separate processes: `isolation = "process"` of environments and tools.

`fork_server.py` starts one process that imports the user's module (`fork_server_process.py`) and forks it for each environment, `Tool` or
function call (`user_process.py`). `isolated_env.py` and `isolated_tool.py` stand for these objects in the controller.
"""
