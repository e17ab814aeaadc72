"""What `make fast` compiles: a set that can be, whether or not there is a compiler here."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def hot() -> tuple[str, ...]:
    spec = importlib.util.spec_from_file_location("compile_tool", ROOT / "tools" / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    modules: tuple[str, ...] = module.HOT
    return modules


def classes(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Each class of a module, and the names of its bases."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name, {base.id for base in node.bases if isinstance(base, ast.Name)}


def test_every_module_exists_and_is_named_once() -> None:
    modules = hot()
    assert len(set(modules)) == len(modules)
    assert [module for module in modules if not (ROOT / f"{module}.py").is_file()] == []


def test_no_compiled_module_defines_a_struct() -> None:
    """A compiled class forgets what msgspec made of it."""
    structs = [name for module in hot() for name, bases in classes(ROOT / f"{module}.py") if "Struct" in bases]
    assert structs == []


def test_what_inherits_from_a_compiled_class_is_compiled() -> None:
    """An interpreted class cannot: the simulation would end in a TypeError, and only where it was made fast."""
    modules = hot()
    compiled = {name for module in modules for name, _ in classes(ROOT / f"{module}.py")}
    every = sorted((ROOT / "squall").rglob("*.py"))
    left = [path for path in every if str(path.relative_to(ROOT).with_suffix("")) not in modules]
    heirs = []
    for path in left:
        imported = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").replace(".", "/") in modules
            for alias in node.names
        }
        heirs += [f"{path.relative_to(ROOT)}: {name}" for name, bases in classes(path) if bases & imported & compiled]
    assert heirs == []
