"""Chat templates: Jinja in a sandbox, with what checkpoints expect to find there.

Knows no tokens. The sandbox lets a template neither reach Python's internals nor change what it is given. It does not bound
time or memory: a template's loops run over the messages, so the size limit of a request bounds them, but a template is code
from the checkpoint and a hostile one can still waste both. Templates never come from a request.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from squall.errors import ModelError, RequestError


class _GenerationBlock(Extension):
    """`{% generation %}` marks, for training, what the assistant said; for a prompt its content is plain text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refused(Exception):
    """The template called `raise_exception`."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template's text.
        specials: special tokens by role, such as `{"bos_token": "<s>"}`, which templates name.
        place: where it came from, for messages.

    Raises:
        ModelError: it does not compile.
    """

    def __init__(self, source: object, specials: Mapping[str, str], place: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self._specials = dict(specials)
        if not isinstance(source, str):
            raise ModelError(f"{place}: chat_template is a {type(source).__name__}, expected a text")
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"{place}: the chat template does not compile: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The prompt of a conversation. Raises RequestError where the template refuses it."""
        given = {**self._specials, "tools": None, "documents": None, **variables}
        try:
            return self._template.render({**given, "messages": messages, "add_generation_prompt": add_generation_prompt})
        except _Refused as refusal:
            one_line = " ".join(str(refusal).split())
            raise RequestError(f"the model's chat template refuses these messages: {one_line}", param="messages") from None
        except Exception as error:  # whatever the code in a template comes to with messages that it did not expect
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RequestError(f"the model's chat template cannot render these messages: {reason}", param="messages") from None


def without_template() -> NoReturn:
    """Raise the error of a model that has no chat template."""
    raise RequestError("this model has no chat template; use /v1/completions, or give the checkpoint one", param="messages")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys; models were trained on text that does neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
