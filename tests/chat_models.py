"""A tiny chat model whose answer is known, and a real chat server on loopback in OpenAI's format."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from runtime.upstream.libraries import transformers

ANSWER = "a red boat sails slowly past the quay"
_TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}assistant"
_UNKNOWN, _START, _END = "?", "assistant", "end"


def save_chat_model(folder: Path, answer: str = ANSWER, template: str | None = _TEMPLATE) -> Path:
    """Write a Llama model that gives one answer, of different words, to everything; return its folder.

    Its layers add nothing, and its head has the next word follow each word.

    Args:
        template: of chats; `None` for a model without one.
    """
    words = [_UNKNOWN, "system", "user", _START, *answer.split(), _END]
    assert len(set(words)) == len(words)
    size = len(words) + len(words) % 2
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=2_048,
        bos_token_id=None,
        eos_token_id=words.index(_END),
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(torch.eye(size).roll(1, 0))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=_UNKNOWN, eos_token=_END)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@dataclass
class ChatServer:
    """A chat server while it is served, and what it was asked.

    Attributes:
        status, body: of each answer; without a body, the answer has `text`.
        seconds: before each answer.
        asked: the bodies of all requests; `keys`, their keys.
    """

    address: str
    text: str = "A red boat sails slowly past the quay."
    status: int = 200
    body: bytes | None = None
    seconds: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def answer(self) -> bytes:
        """Return the body of an answer."""
        message = {"role": "assistant", "content": self.text}
        choices: Sequence[Any] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return (
            json.dumps({"object": "chat.completion", "choices": choices}).encode() if self.body is None else self.body
        )


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    """Serve `POST /v1/chat/completions` on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.asked.append(request)
            served.keys.append(self.headers.get("Authorization"))
            end = time.monotonic() + served.seconds
            while time.monotonic() < end and not closing.is_set():
                time.sleep(0.02)
            found = self.path == "/v1/chat/completions"
            body = served.answer()
            self.send_response(served.status if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:  # the client has left
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    closing = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = ChatServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
