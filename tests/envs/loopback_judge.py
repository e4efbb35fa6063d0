"""An HTTP server on the loopback interface that answers by script."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Script:
    """What the server received, and how it answers.

    Attributes:
        answer: `answer(request, number) -> (status, headers, body)`; a body that is not text is sent as JSON.
        requests: path, headers and body of each request.
        most_at_once: largest number of requests at the same time.
    """

    def __init__(self, answer):
        self.answer, self.requests, self.most_at_once = answer, [], 0
        self.lock, self.now = threading.Lock(), 0
        self.stopping = threading.Event()


@contextmanager
def serving(answer):
    """Yields the base URL and the script of a running server."""
    script = Script(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with script.lock:
                script.requests.append((self.path, dict(self.headers), body))
                number = len(script.requests)
                script.now += 1
                script.most_at_once = max(script.most_at_once, script.now)
            try:
                status, headers, content = script.answer(body, number)
            finally:
                with script.lock:
                    script.now -= 1
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

        def handle_one_request(self):
            try:
                super().handle_one_request()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", script
    finally:
        script.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()


def reply(text, **usage):
    """A chat completion."""
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}], **({"usage": usage} if usage else {})}


def until(condition, seconds=60.0):
    """Wait for a condition; returns whether it came true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()
