"""Starts the kernel of each page as a fork of one process that has imported torch, qkv and matplotlib already.

An import takes two seconds, and a build runs a hundred pages. The kernel specification that Jupyter finds starts this
file as a small program, which asks the server for a fork, passes on its folder and waits for its end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def serve(address: str) -> None:
    """Fork a kernel for each connection; end with the process that started the server."""
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as a kernel sets it before the import
    for name in ("ipykernel.kernelapp", "matplotlib.pyplot", "pandas", "torch"):
        importlib.import_module(name)
    import qkv

    for name in qkv.__all__:
        getattr(qkv, name)  # imported on first use
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the children
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(8)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _kernel(connection)
            connection.close()


def _kernel(connection: socket.socket) -> None:
    """Become the kernel; it ends with its client."""
    from ipykernel.kernelapp import IPKernelApp

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked = json.loads(connection.makefile().readline())
    os.chdir(asked["folder"])
    if os.fork() == 0:
        os.environ.update(asked["environment"])
        sys.argv = ["ipykernel"]
        IPKernelApp.launch_instance(argv=[*asked["words"], "--IPKernelApp.parent_handle=1"])  # without its greeting
        os._exit(0)
    _, status = os.wait()
    with contextlib.suppress(OSError):
        connection.sendall(b"ended")
    os._exit(os.waitstatus_to_exitcode(status))


def ask(address: str, *words: str) -> None:
    """Ask for a kernel, and wait until it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nbclient interrupts a kernel before it ends it
    with socket.socket(socket.AF_UNIX) as connection:
        while connection.connect_ex(address):  # the server still imports
            time.sleep(0.1)
        asked = {"folder": os.getcwd(), "environment": dict(os.environ), "words": words}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        connection.recv(16)


def start(app: Sphinx) -> None:
    """Write the kernel specification, and start the server."""
    folder = Path(app.outdir).parent / "kernels"
    address = folder / "socket"
    (folder / "kernels" / "python3").mkdir(parents=True, exist_ok=True)
    address.unlink(missing_ok=True)
    argv = [sys.executable, __file__, "ask", str(address), "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (folder / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    os.environ["JUPYTER_PATH"] = str(folder)
    app.kernel_server = subprocess.Popen([sys.executable, __file__, "serve", str(address)])  # type: ignore[attr-defined]


def stop(app: Sphinx, error: Exception | None) -> None:
    app.kernel_server.terminate()  # type: ignore[attr-defined]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", start)
    app.connect("build-finished", stop)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
