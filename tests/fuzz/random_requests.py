"""Strategies for random values of `/generate`, bodies for gradio's endpoints, file paths and request targets."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import strategies as st

_PARAMETER = re.compile(r"\{[^}]*\}")
TEXT = st.text(max_size=30) | st.sampled_from(
    ["", "\0", "../../etc/passwd", "\ud800", "<script>", "auto", "NaN", "a" * 6000, "{}", "http://127.0.0.1/", "null"]
)
NUMBER = st.sampled_from([0, 1, -1, 2**31, 2**53, 10**40, 1.5, -0.0, 1e300, float("nan"), float("inf")]) | st.integers()
SCALAR = st.none() | st.booleans() | NUMBER | TEXT
FILE = st.fixed_dictionaries(
    {
        "path": TEXT | st.sampled_from(["http://127.0.0.1:9/x", "/etc/passwd"]),
        "meta": st.just({"_type": "gradio.FileData"}),
    }
)
JSON = st.recursive(
    SCALAR | FILE, lambda one: st.lists(one, max_size=4) | st.dictionaries(TEXT, one, max_size=4), max_leaves=12
)
# Without files, which the middleware rejects.
DATA = st.recursive(
    SCALAR, lambda one: st.lists(one, max_size=4) | st.dictionaries(TEXT, one, max_size=4), max_leaves=12
)
SIDE = st.sampled_from([16, 32, 64, "auto", 17, 0, -16, 8208, 10**9]) | SCALAR
COPY = f"sha256:{'0' * 64}/boat.png"
IMAGE = st.sampled_from([COPY, "sha256:0/a", "sha256:../a", "/etc/passwd", "boat.png", "-"]) | JSON
BACKENDS = [None, {}, {"vae": "pytorch"}, ["vae=pytorch"], {"vae_encoder": "pytorch"}, {"all": "tensorrt"}]
PROMPTS = ["a red boat", "a blue car", "[0s: a boat] [1s-0s: x", "a {red|blue} (x:1.5", "{2$$x|__y__}", "(x:1.5)", ""]
# A valid value of each field of a request, and random ones. Accepted requests are small, see the server.
FIELD_VALUES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "prompt": (
        "a red boat",
        st.sampled_from(PROMPTS) | JSON,
    ),
    "original_prompt": (None, st.none() | TEXT | JSON),
    "template": (None, st.none() | st.sampled_from(["a {red|blue} boat", "__x__"]) | JSON),
    "negative_prompt": (None, st.none() | TEXT | JSON),
    "model": ("tiny", st.sampled_from(["tiny", "none", "/etc", "../tiny", "diorama\0"]) | JSON),
    "width": (32, SIDE),
    "height": (32, SIDE),
    "frames": (5, st.sampled_from([1, 5, 9, 4, 0, 4005]) | SCALAR.filter(lambda value: value not in range(10, 4002))),
    "seconds": ("auto", st.sampled_from(["auto", 0, 0.5, -1, 601, True, "1", None, [1]])),
    "fps": (8, st.sampled_from([8, "auto", 0, 121]) | JSON),
    "steps": (1, st.sampled_from([1, 2, 0, 1001, 10**40]) | SCALAR.filter(lambda value: value not in range(3, 1001))),
    "guidance_scale": (1.0, st.sampled_from([1.0, 3.0, "auto", -1, 101]) | JSON),
    "guidance_scale_2": (1.0, st.sampled_from([1.0, 3.0, "auto"]) | JSON),
    "nag": (1, st.sampled_from([1, 1.0, 11, "auto", 0.5, 101, "11"]) | JSON),
    "seed": (7, st.sampled_from([7, "auto", -1]) | JSON),
    "crf": ("auto", st.sampled_from([0, 17, 51, 52, -1, "auto"]) | JSON),
    "backends": (None, st.sampled_from(BACKENDS) | JSON),
    "build": ("never", st.sampled_from(["auto", "never"]) | JSON),
    "offload": ("none", st.sampled_from(["auto", "none", "model"]) | JSON),
    "quantization": ("none", st.sampled_from(["auto", "none", "fp8"]) | JSON),
    "on_out_of_memory": ("retry", st.sampled_from(["retry", "any", "ask"]) | JSON),
    "gpus": ("auto", st.sampled_from(["auto", 1, 2, 0, "0,1", [0, 0]]) | JSON),
    "loras": (
        None,
        st.sampled_from([None, [], ["style:0.8"], ["../a"], ["a.safetensors"], ["a:-1"], ["a@0-0.5", "a@0.4-1"]])
        | JSON,
    ),
    "step_cache": (
        "none",
        st.sampled_from(["none", "first-block:0.2", "first-block:9", "magcache", "taylorseer:3"]) | JSON,
    ),
    "guidance_cache": ("off", st.sampled_from(["off", "0.1", 0.1, "0.3", 0]) | JSON),
    "attention": ("auto", st.sampled_from(["auto", "fp8", "sage", "sol", "sol:1.5", "sol:9"]) | JSON),
    "compile": ("auto", st.sampled_from(["auto", "always", "never"]) | JSON),
    "shift": ("auto", st.sampled_from(["auto", 3.0, 0, -1]) | JSON),
    "stages": ("1", st.sampled_from(["1", 2, "2", "0", ""]) | JSON),
    "vae_precision": ("auto", st.sampled_from(["auto", "float32", "bfloat16"]) | JSON),
    "loop": ("off", st.sampled_from(["off", "on", "yes"]) | JSON),
    "interpolate": ("off", st.sampled_from(["off", "2", 4, "3", ""]) | JSON),
    "upscale": ("auto", st.sampled_from(["auto", "off", "2", 2, "5", "2x", ""]) | JSON),
    "upscaler": ("auto", st.sampled_from(["auto", "none", "../x", "/etc/passwd"]) | JSON),
    "image": (None, IMAGE),
    "last_image": (None, IMAGE),
    "keyframes": (None, IMAGE | st.lists(IMAGE, max_size=17)),
    "keyframe_seconds": (None, st.sampled_from([[], "", 1, "1, 0.5", [0.5, 2], 601, -1, "1,", [[1]]]) | JSON),
    "image_fit": ("crop", st.sampled_from(["crop", "fit", ""]) | JSON),
    "extend": (None, IMAGE),
    "video": (None, IMAGE),
    "strength": (0.6, st.sampled_from([0.6, 1, 0, "auto", 1.5]) | JSON),
    "control": (None, IMAGE),
    "face": (None, IMAGE),
    "background": (None, IMAGE),
    "mask": (None, IMAGE | st.sampled_from(["box:10,20,30,40", "box:0,0,50,50+50,50,50,50", "box:", "box:90,0,20,1"])),
    "outpaint": ("0", st.sampled_from([25, "10, 0, 10, 0", [1, 2, 3, 4], [1, 2], [], "", -1, 301, "nan"]) | JSON),
    "extend_frames": ("auto", st.sampled_from([1, 9, 82, 0, "auto", "few", 1.5]) | JSON),
    "join": (None, IMAGE),
    "references": (None, IMAGE | st.lists(IMAGE, max_size=9)),
    "overlap": ("1", st.sampled_from(["1", "5", "2", 5, ""]) | JSON),
    "control_start": (0, st.sampled_from([0, 1.5, "2", -1, 1e9, "auto", ""]) | JSON),
    "preprocess": ("off", st.sampled_from(["edges", "gray", "scribble", "blur", "depth", "pose", "normals", 1]) | JSON),
    "control_scale": ("1", st.sampled_from([1, "1, 0.5", [0.5, 2], [], "", 5, -1, "1,", [[1]]]) | JSON),
    "sound": ("on", st.sampled_from(["on", "off", "lossless", True, ""]) | JSON),
    "image_position": ("center", st.sampled_from(["center", "top", "0.2,0.8"]) | JSON),
}


def changed(names: Sequence[str]) -> st.SearchStrategy[list[Any]]:
    """Return valid values of some fields, of which one is random: most requests are nearly valid."""
    good = [FIELD_VALUES[name][0] for name in names]

    def with_one(at: int) -> st.SearchStrategy[list[Any]]:
        return FIELD_VALUES[names[at]][1].map(lambda value: [*good[:at], value, *good[at + 1 :]])

    return st.integers(0, len(names) - 1).flatmap(with_one)


SESSION = st.sampled_from(["abc123", "x" * 64, "x" * 65, "../a", "a b", ""]) | SCALAR


def field_values(names: Sequence[str]) -> st.SearchStrategy[list[Any]]:
    """Return lists of values of some fields for `/generate`, and a few of another length."""
    wild = st.tuples(*(FIELD_VALUES[name][1] for name in names)).map(list)
    return changed(names) | changed(names) | wild | st.lists(JSON, max_size=len(names) + 3)


def bodies(names: Sequence[str]) -> st.SearchStrategy[bytes]:
    """Return bodies of calls: most are JSON objects with gradio's keys, some are arbitrary."""
    call = st.fixed_dictionaries(
        {"data": field_values(names) | JSON},
        optional={
            "fn_index": st.integers(-3, 60) | SCALAR,
            "session_hash": SESSION,
            "event_id": SCALAR,
            "event_data": JSON,
            "trigger_id": st.integers(-3, 60) | SCALAR,
            "simple_format": SCALAR,
            "batched": SCALAR,
            "oauth_token": SCALAR,
            "api_name": TEXT,
        },
    )
    plain = (call | call | call | JSON).map(lambda value: json.dumps(value).encode())
    odd = st.binary(max_size=60) | st.sampled_from(
        [b"[" * 20_000, b'{"data":' * 5_000, b"\xff\xfe", b"{", b"x" * 300_000]
    )
    return plain | plain | plain | odd


def calls(functions: dict[int, int], names: Sequence[str]) -> st.SearchStrategy[bytes]:
    """Return valid bodies of calls of a page's functions, given the number of values of each and the form's fields."""

    def of(number: int) -> st.SearchStrategy[dict[str, Any]]:
        values = st.lists(DATA, min_size=functions[number], max_size=functions[number])
        form = changed(names).map(lambda values: [*values, *("auto",) * 20][: functions[number]])
        return st.fixed_dictionaries(
            {
                "fn_index": st.just(number),
                "session_hash": st.integers(0, 10**6).map(lambda n: f"fuzz{n}"),
                "data": values | form if functions[number] > len(names) // 2 else values,
            },
            optional={
                "event_data": DATA,
                "trigger_id": st.integers(-3, 60),
                "event_id": TEXT,
                "simple_format": st.booleans(),
            },
        )

    return st.sampled_from(sorted(functions)).flatmap(of).map(lambda call: json.dumps(call).encode())


def asked(names: Sequence[str]) -> st.SearchStrategy[bytes]:
    """Return valid bodies for `/generate`."""
    return changed(names).map(lambda values: json.dumps({"data": values}).encode())


def paths(places: list[Path]) -> st.SearchStrategy[bytes]:
    """Return file paths as in a request's target: existing files, by direct and unusual spellings."""
    place = st.sampled_from([str(path) for path in places])
    up = st.sampled_from(
        ["/../", "/%2e%2e/", "/..%2f", "/..%5c", "//", "/./", "/%252e%252e/", "\\..\\", "/%c0%ae%c0%ae/", "%00"]
    )
    ways = st.tuples(place, up, place).map(lambda parts: parts[0] + parts[1] + parts[2].lstrip("/"))
    named = st.tuples(place, up, st.sampled_from([path.name for path in places])).map("".join)
    mangled = st.tuples(place, st.integers(0, 80), TEXT).map(
        lambda part: part[0][: part[1]] + part[2] + part[0][part[1] :]
    )
    quoted = (place | mangled | TEXT).map(lambda path: quote(path, safe="/%", errors="surrogatepass"))
    doubled = place.map(lambda path: quote(quote(path, safe=""), safe=""))
    whole = place.map(lambda path: "".join(f"%{byte:02x}" for byte in path.encode()))
    ended = st.tuples(
        place, st.sampled_from(["/", "%00.mp4", "%0a", "?x=.mp4", "#.mp4", ";.mp4", ".mp4", "::$DATA", "%20"])
    ).map("".join)
    return (ways | named | quoted | doubled | whole | ended | place).map(_target)


def addresses(routes: Sequence[str]) -> st.SearchStrategy[bytes]:
    """Return targets with random parts, below a page's routes and elsewhere.

    Args:
        routes: their paths, with parameters in braces.
    """
    part = (TEXT | st.sampled_from(["a", "1", "generate", "0" * 32, "predict"])).map(
        lambda text: quote(text, safe="", errors="surrogatepass")
    )
    parts = st.lists(part, min_size=1, max_size=4).map("/".join)
    below = st.tuples(st.sampled_from([*routes, "/{path}"]), parts).map(
        lambda pair: _PARAMETER.sub(lambda _: pair[1], pair[0])
    )
    query = st.sampled_from(["", "?"]) | st.lists(
        st.tuples(
            st.sampled_from(["session_hash", "page", "deep_link", "upload_id", "__sign", "all_endpoints"]), part
        ).map("=".join),
        max_size=3,
    ).map(lambda pairs: "?" + "&".join(pairs))
    return st.tuples(below, query).map("".join).map(_target)


def panel_calls(panels: Mapping[str, Sequence[str]], form: int) -> st.SearchStrategy[tuple[bytes, bytes]]:
    """Return target and body of calls of panels.

    Args:
        panels: words of each panel, among them its actions.
        form: number of values of the form in Make.
    """

    def of(name: str) -> st.SearchStrategy[tuple[bytes, bytes]]:
        word = st.sampled_from(panels[name])
        values = st.dictionaries(word | TEXT, DATA | word, max_size=4)
        call = st.fixed_dictionaries(
            {
                "action": word | word | st.just("refresh") | TEXT,
                "target": st.sampled_from(["", "tiny", "0123abcd", "vae", "0123abcd 89abcdef", "../x"]) | TEXT,
                "values": values,
                "view": values,
                "form": st.lists(SCALAR, min_size=form, max_size=form) | st.lists(DATA, max_size=4),
                "drawn": values,
            }
        )
        return call.map(lambda sent: (f"/tandem/panels/{name}".encode(), json.dumps(sent).encode()))

    return st.sampled_from(sorted(panels)).flatmap(of)


_NAMES = (
    b"Origin", b"Sec-Fetch-Site", b"X-Forwarded-Host", b"X-Forwarded-Proto", b"X-Gradio-Server", b"Range", b"Cookie",
    b"Content-Type", b"Host", b"If-Range", b"If-None-Match", b"Accept-Encoding", b"X-Forwarded-For", b"Referer",
)  # fmt: skip
_VALUES = (
    b"null", b"https://evil.example", b"cross-site", b"same-origin", b"none", b"bytes=0-1-2", b"bytes=0-0,2-3",
    b"bytes=\xb2-\xb3", b"bytes=99999999999999999999-", b"bytes=5-2", b"bytes=-0", b"multipart/form-data",
    b"multipart/form-data; boundary=x", b"application/json", b"text/plain", b"http://[", b"a:b:c", b"[::1", b"x y",
    b"localhost", b"gzip", b"br", b"*", b"access-token=1", b"a=b;;=;c", b"http://127.0.0.1", b"127.0.0.1@evil",
)  # fmt: skip
_ANY_VALUE = st.binary(max_size=20).map(lambda raw: bytes(byte for byte in raw if byte not in b"\r\n\0"))
HEADERS = st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(_VALUES) | _ANY_VALUE, max_size=3)
FORMS = st.dictionaries(
    st.sampled_from(["username", "password", "scope"]), TEXT.filter(str.isprintable), max_size=3
).map(lambda fields: urlencode(fields, errors="replace").encode())
METHODS = st.sampled_from(
    [b"GET", b"GET", b"GET", b"POST", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE"]
)


def _target(text: str) -> bytes:
    """Return the bytes between method and version, without blanks and control characters."""
    raw = text.encode("utf-8", "surrogatepass")
    return bytes(byte for byte in raw if byte > 0x20 and byte != 0x7F) or b"/"
