"""Writes src/h3kv/api from the protocols in proto; with --check it only says which files are stale."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto"
SOURCE = ROOT / "src"
PACKAGE = Path("h3kv/api")

HEAD = "# Written by tools/genproto.py from {source}. Do not edit: run `make proto`.\n"
CALLABLES = {
    (False, False): "UnaryUnaryMultiCallable",
    (False, True): "UnaryStreamMultiCallable",
    (True, False): "StreamUnaryMultiCallable",
    (True, True): "StreamStreamMultiCallable",
}
"""Types of a stub's calls by whether requests and responses are streams."""


def generate(folder: Path) -> None:
    """Write all modules into a folder, the package's path below it."""
    sources = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))
    well_known = str(files("grpc_tools") / "_proto")
    descriptors = folder / "descriptors"
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTO}",
            f"-I{well_known}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            f"--descriptor_set_out={descriptors}",
            *sources,
        ]
    )
    services = [source for source in sources if source.endswith("_service.proto")]
    code = code or protoc.main(["protoc", f"-I{PROTO}", f"-I{well_known}", f"--grpc_python_out={folder}", *services])
    if code:
        sys.exit("error: the protocols do not compile: see above")
    described = FileDescriptorSet.FromString(descriptors.read_bytes())
    descriptors.unlink()
    for file in described.file:
        if file.service:
            stub = folder / file.name.replace(".proto", "_pb2_grpc.pyi")
            stub.write_text("".join(stub_lines(file)), encoding="utf-8")
    write_packages(folder)
    for path in sorted(folder.rglob("*.py*")):
        text = path.read_text(encoding="utf-8")
        path.write_text(HEAD.format(source=source_of(path.relative_to(folder))) + text, encoding="utf-8")


def source_of(path: Path) -> str:
    """The file or folder under proto that a generated file comes from."""
    if path.name == "__init__.py":
        return f"proto/{path.parent.as_posix()}"
    return f"proto/{path.parent.as_posix()}/{path.name.partition('_pb2')[0]}.proto"


def write_packages(folder: Path) -> None:
    """Make each folder of generated modules a package."""
    top = folder / PACKAGE
    for package in [top, *sorted(path for path in top.rglob("*") if path.is_dir())]:
        inside = package.relative_to(top).as_posix()
        sentence = "Messages and services of all processes." if inside == "." else f"Protocol {inside}."
        (package / "__init__.py").write_text(f'"""{sentence}"""\n', encoding="utf-8")


def stub_lines(file: FileDescriptorProto) -> Iterator[str]:
    """Type stub of a `_pb2_grpc` module, for which protoc writes none."""
    module = file.name.rpartition("/")[2].replace(".proto", "_pb2")
    package = file.package
    yield f"import abc\nfrom collections.abc import Iterator\n\nimport grpc\n\nfrom {package} import {module}\n"
    for service in file.service:
        yield f"\nclass {service.name}Stub:\n    def __init__(self, channel: grpc.Channel) -> None: ...\n"
        for method in service.method:
            kind = CALLABLES[method.client_streaming, method.server_streaming]
            request, response = messages(method, module)
            yield f"    {method.name}: grpc.{kind}[{request}, {response}]\n"
        yield f"\nclass {service.name}Servicer(metaclass=abc.ABCMeta):\n"
        for method in service.method:
            request, response = messages(method, module)
            argument = f"request_iterator: Iterator[{request}]" if method.client_streaming else f"request: {request}"
            result = f"Iterator[{response}]" if method.server_streaming else response
            yield "    @abc.abstractmethod\n"
            yield f"    def {method.name}(self, {argument}, context: grpc.ServicerContext) -> {result}: ...\n"
        name = f"{service.name}Servicer"
        yield f"\ndef add_{name}_to_server(servicer: {name}, server: grpc.Server) -> None: ...\n"


def messages(method: MethodDescriptorProto, module: str) -> tuple[str, str]:
    """Python names of a call's request and response, which lie beside their service."""
    request, response = (name.rpartition(".")[2] for name in (method.input_type, method.output_type))
    return f"{module}.{request}", f"{module}.{response}"


def contents(top: Path) -> dict[str, str]:
    """Generated files by their path."""
    return {
        path.relative_to(top).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((top / PACKAGE).rglob("*.py*"))
        if path.suffix in {".py", ".pyi"}
    }


def main() -> None:
    """Write or check all modules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a file is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        wanted = contents(Path(folder))
    found = contents(SOURCE)
    stale = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if check and stale:
        sys.exit(f"error: src/{PACKAGE} is stale ({', '.join(stale)}): run `make proto`")
    for name in [] if check else stale:
        path = SOURCE / name
        if name not in wanted:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[name], encoding="utf-8")
        print(f"wrote src/{name}")


if __name__ == "__main__":
    main()
