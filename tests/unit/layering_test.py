#!/usr/bin/env python3
"""The layers of server/ARCHITECTURE.md hold: every #include of this tree is one that its folder may have.

A folder is a layer. A row of ALLOWED names the folders that a layer may include from, beside itself; the longest matching row
counts. FORBIDDEN keeps whole libraries out of layers. Run as it is: tests/unit/layering_test.py
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

ALLOWED = {
    "server/base": [],
    "server/format": ["server/base"],
    "server/vram": ["server/base"],
    "server/tensor": ["server/base", "server/format", "server/vram"],
    "server/nn": ["server/base", "server/tensor", "server/vram"],
    "server/model": ["server/base", "server/format", "server/nn", "server/tensor", "server/vram"],
    "server/lora": ["server/base", "server/format", "server/model", "server/nn", "server/tensor", "server/vram"],
    "server/worker": ["server/base", "server/format", "server/lora", "server/model", "server/nn", "server/tensor", "server/vram"],
    "server/metrics": ["server/base", "server/vram"],
    "server/registry": ["server/base", "server/format"],
    "server/scheduler": ["server/base"],
    "server/rpc": ["server/base", "server/format", "server/vram", "proto/support"],
    "server/scheduler_rpc": ["server/base", "server/format", "server/metrics", "server/registry", "server/rpc", "server/scheduler", "server/vram",
                             "proto/support"],
    # A worker's service sees the engine's contract and nothing behind it.
    "server/worker_rpc": ["server/base", "server/format", "server/metrics", "server/rpc", "server/vram", "server/worker/engine.h", "proto/support"],
    "server/app": ["server"],
    "proto/support": ["server/base"],
    "client": ["proto/support"],
    "client/cli": ["client", "proto/support", "server/base", "server/format"],
    "client/examples": ["client/client.h", "proto/support/status.h"],
    "tests": ["server", "client", "proto", "tests"],
}

TORCH = r"(ATen|torch|c10)/"
GRPC = r"(grpc|grpcpp)/|h3/v1/"
FORBIDDEN = {
    "server/base": f"{TORCH}|{GRPC}",
    "server/format": f"{TORCH}|{GRPC}",
    "server/vram": f"{TORCH}|{GRPC}",
    "server/metrics": f"{TORCH}|{GRPC}",
    "server/registry": f"{TORCH}|{GRPC}",
    "server/scheduler": f"{TORCH}|{GRPC}",
    "server/tensor": GRPC,
    "server/nn": GRPC,
    "server/model": GRPC,
    "server/lora": GRPC,
    "server/worker": GRPC,
    "server/rpc": TORCH,
    "server/scheduler_rpc": TORCH,
    "server/worker_rpc": TORCH,
    "server/app": TORCH,
    "proto/support": TORCH,
    "client": TORCH,
}

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
OURS = ("server/", "client/", "proto/", "tests/")


def row(table, path):
    """The entry of the longest folder that holds `path`."""
    fits = [folder for folder in table if path.startswith(folder + "/")]
    return max(fits, key=len, default=None)


def problems(path, included):
    layer = row(ALLOWED, path)
    if included.startswith(OURS):
        fits = any(included == it or included.startswith(it + "/") for it in [layer, *ALLOWED[layer]])
        # `client` may not reach down into its own command line.
        if not fits or row(ALLOWED, included) == "client/cli" and layer == "client":
            yield f"{layer} may not include {included}"
    forbidden = row(FORBIDDEN, path)
    if forbidden and re.match(FORBIDDEN[forbidden], included):
        yield f"{forbidden} may not include <{included}>"


def main():
    found, files = [], 0
    for top in ("server", "client", "proto", "tests"):
        for source in sorted((ROOT / top).rglob("*")):
            if source.suffix not in (".h", ".cc"):
                continue
            files += 1
            path = source.relative_to(ROOT).as_posix()
            if row(ALLOWED, path) is None:
                found.append(f"{path}: its folder is no layer; add it to ALLOWED in tests/unit/layering_test.py")
                continue
            for number, line in enumerate(source.read_text().splitlines(), 1):
                if match := INCLUDE.match(line):
                    found += [f"{path}:{number}: {problem}" for problem in problems(path, match[1])]
    # A test that checks nothing must not pass.
    assert files > 100, f"only {files} source files below {ROOT}"
    assert list(problems("server/model/x.h", "server/lora/stack.h")) and list(problems("server/scheduler/x.cc", "grpcpp/grpcpp.h"))
    print("\n".join(found) or f"{files} files keep to their layers")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
