"""The layers and habits that the design promises, read off the source with `ast`: nothing is imported here."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A folder may import from the folders on its right and from itself; the three siblings exchange plain tensors only.
ALLOWED = {
    "configs": set(),
    "kernels": set(),
    "router": {"kernels"},
    "kv_cache": {"kernels"},
    "expert_parallel": {"kernels"},
    "moe.model": {"router", "kv_cache", "expert_parallel", "kernels", "configs"},
    "moe.engine": {"moe.model", "router", "kv_cache", "expert_parallel", "kernels", "configs"},
    "moe.batch": {"moe.engine", "moe.model", "router", "kv_cache", "expert_parallel", "kernels", "configs"},
    "launch": {
        "moe",
        "moe.batch",
        "moe.engine",
        "moe.model",
        "router",
        "kv_cache",
        "expert_parallel",
        "kernels",
        "configs",
    },
    "moe": {"moe.engine", "moe.model", "configs", "kernels"},  # moe/__init__.py, the public face, and moe/version.py
}
LAYERS = sorted(ALLOWED)
TOP = {name.split(".")[0] for name in LAYERS} | {"tests", "benchmarks", "tools"}
# Third parties that a machine may lack: the only imports that may stand inside a function.
OPTIONAL = {"datasets", "deep_ep", "flash_attn", "flash_attn_interface", "pyarrow", "zstandard"}


def layer_of(module: str) -> str | None:
    """The layer a dotted name of ours belongs to; None for a third party's."""
    parts = module.split(".")
    if parts[0] not in TOP:
        return None
    two = ".".join(parts[:2])
    if two == "moe.version":
        return None  # a text that anyone may name
    return two if two in ALLOWED else parts[0]


def files_of(layer: str) -> list[Path]:
    folder = ROOT / layer.replace(".", "/")
    pattern = folder.glob("*.py") if layer == "moe" else folder.rglob("*.py")
    return sorted(path for path in pattern if "__pycache__" not in path.parts)


def product_files() -> list[Path]:
    return [path for layer in LAYERS for path in files_of(layer)]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module as a dotted name, with its line; `from a import b` gives both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the module in full"
            assert node.module is not None
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def violations(layer: str, tree: ast.AST) -> list[str]:
    """Imports that the layer may not make. `moe` alone (its public face) is open to `launch` only."""
    found = []
    for module, line in imports(tree):
        target = layer_of(module)
        if target is not None and target != layer and target not in ALLOWED[layer]:
            # `from moe.engine import x` also yields moe.engine.x, and `from moe import batch` yields moe: same rule.
            found.append(f"line {line}: {layer} imports {module}")
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_downward(layer: str) -> None:
    found = [f"{path.relative_to(ROOT)} {text}" for path in files_of(layer) for text in violations(layer, parse(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("router", "from kv_cache.pool import KVPool"),  # siblings
        ("kernels", "import moe.model.config"),  # upward
        ("moe.model", "from moe.engine.request import Request"),  # upward inside moe
        ("moe.engine", "from moe import LLM"),  # the public face, from below it
        ("moe.model", "def f():\n    from moe.engine import request"),  # deferred
        ("configs", "import tests.compare"),  # tests are nobody's dependency
    ],
)
def test_the_rule_sees_a_wrong_import(layer: str, source: str) -> None:
    assert violations(layer, ast.parse(source))


def test_imports_inside_functions_are_optional_third_parties() -> None:
    found = []
    for path in product_files():
        for function in ast.walk(parse(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                for module, line in imports(function):
                    if module.split(".")[0] not in OPTIONAL:
                        found.append(f"{path.relative_to(ROOT)}:{line} imports {module} inside a function")
    assert not found, "\n".join(found)


def test_kernels_is_a_namespace_package_and_other_inits_are_empty() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide the distribution of that name"
    for path in product_files():
        if path.name == "__init__.py" and path != ROOT / "moe" / "__init__.py":
            assert path.read_text() == "", f"{path.relative_to(ROOT)} is not empty"
    for path in (ROOT / "tests").rglob("__init__.py"):
        raise AssertionError(f"{path.relative_to(ROOT)}: test folders are no packages")


def test_configs_import_the_standard_library_and_omegaconf_only() -> None:
    for path in files_of("configs"):
        for module, line in imports(parse(path)):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or top in {"omegaconf", "configs"}, f"{path.name}:{line} {module}"


def test_kernels_import_torch_and_triton_only() -> None:
    for path in files_of("kernels"):
        for module, line in imports(parse(path)):
            top = module.split(".")[0]
            allowed = top in sys.stdlib_module_names or top in {"torch", "triton", "kernels"}
            assert allowed, f"{path.name}:{line} imports {module}"


def test_no_model_class_of_transformers() -> None:
    """Tokenizer and chat template come from transformers; the network is ours."""
    for path in product_files():
        for module, line in imports(parse(path)):
            if module.split(".")[0] == "transformers":
                name = module.rsplit(".", 1)[-1]
                model_class = name.startswith("AutoModel") or "For" in name or name.endswith("Model")
                assert not model_class and "modeling" not in module, f"{path.relative_to(ROOT)}:{line} imports {module}"


def test_environment_is_read_in_configs_and_launch_only() -> None:
    for path in product_files():
        if path.relative_to(ROOT).parts[0] in {"configs", "launch"}:
            continue
        for node in ast.walk(parse(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in {"environ", "environb", "getenv"}, f"{path.relative_to(ROOT)}:{node.lineno} reads {name}"


def test_no_pickle() -> None:
    """Weights are safetensors; a pickle would run code from the checkpoint."""
    for path in product_files():
        tree = parse(path)
        for module, line in imports(tree):
            assert module.split(".")[0] not in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, (
                f"{path.relative_to(ROOT)}:{line} imports {module}"
            )
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), (
                    f"{path.relative_to(ROOT)}:{node.lineno} torch.load"
                )


def test_public_things_have_docstrings() -> None:
    missing = []
    for path in product_files():
        tree = parse(path)
        name = path.relative_to(ROOT)
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            missing.append(f"{name}: the file")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                # A Triton kernel's description is the comment block above it: pointers, shapes, grid, padding.
                # Overloads are the types of one function, which has the docstring.
                decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
                if "jit" not in decorators and "overload" not in decorators and not ast.get_docstring(node):
                    missing.append(f"{name}:{node.lineno} {node.name}")
    assert not missing, "\n".join(missing)


def test_every_package_is_packaged() -> None:
    """pyproject names the packages one by one; a folder that is not named would be missing from the wheel."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for path in product_files():
        package = ".".join(path.relative_to(ROOT).parent.parts)
        assert f'"{package}",' in text, f"{package} is not in pyproject's packages"
