"""Runs a proxy that terminates TLS with a certificate signed by an authority that is created for the test."""

from __future__ import annotations

import asyncio
import queue
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return the file of the authority's certificate, and a file with the key and signed certificate for localhost."""
    own, signed, pair = folder / "authority.pem", folder / "signed.pem", folder / "localhost.pem"
    key, extension = folder / "authority.key", folder / "extension"
    extension.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    new = ["req", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    for words in (
        [*new, "-x509", "-keyout", key, "-out", own, "-subj", "/CN=an authority of a test"],
        [*new, "-keyout", pair, "-out", folder / "request", "-subj", "/CN=localhost"],
        ["x509", "-req", "-in", folder / "request", "-CA", own, "-CAkey", key, "-days", "2", "-extfile", extension,
         "-out", signed],
    ):  # fmt: skip
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
    pair.write_text(pair.read_text() + signed.read_text())
    return own, pair


@contextmanager
def proxy(pair: Path, port: int) -> Iterator[str]:
    """Forward decrypted bytes to 127.0.0.1:`port`; yield the https address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    opened: queue.Queue[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(_copy(reader, behind[1]), _copy(behind[0], writer))
        except OSError:
            pass  # one side has gone
        finally:
            behind[1].close()
            writer.close()

    async def serve() -> None:
        ends = asyncio.Event()
        async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context) as started:
            opened.put((started.sockets[0].getsockname()[1], asyncio.get_running_loop(), ends))
            await ends.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    number, loop, ends = opened.get(timeout=60)
    try:
        yield f"https://localhost:{number}"
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(60)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(65_536):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
