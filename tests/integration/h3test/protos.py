"""Python stubs of proto/h3/v1, made anew for each test run: what a client of ours would do by hand."""

import atexit
import importlib
import shutil
import sys
import tempfile

from grpc_tools import protoc

from h3test import ROOT

_out = tempfile.mkdtemp(prefix="h3-stubs-")
atexit.register(shutil.rmtree, _out, ignore_errors=True)
_files = sorted(str(path) for path in (ROOT / "proto/h3/v1").glob("*.proto"))
if protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={_out}", f"--grpc_python_out={_out}", *_files]) != 0:
    raise RuntimeError("grpcio-tools cannot compile proto/h3/v1")
sys.path.insert(0, _out)

types = importlib.import_module("h3.v1.types_pb2")
generation = importlib.import_module("h3.v1.generation_pb2")
generation_grpc = importlib.import_module("h3.v1.generation_pb2_grpc")
adapters = importlib.import_module("h3.v1.adapters_pb2")
adapters_grpc = importlib.import_module("h3.v1.adapters_pb2_grpc")
operations = importlib.import_module("h3.v1.operations_pb2")
operations_grpc = importlib.import_module("h3.v1.operations_pb2_grpc")
