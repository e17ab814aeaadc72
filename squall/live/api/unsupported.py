"""The fields that would change the output if they were obeyed, and are not: refused by name, never dropped in silence.

A neutral value (the one that means "off") is accepted. Fields that change nothing in the output are listed beside them.
"""

from __future__ import annotations

from typing import Any

from squall.errors import RequestError
from squall.live.api.fields import Fields

HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "parallel_tool_calls",
    "prompt_cache_retention", "priority", "request_id",
)  # fmt: skip
"""Accepted: they say who asks, or how fast, not what."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": ("",),
    "stop_regex": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "lora_path": (),
    "kv_transfer_params": (),
}
"""Refused, except for these values."""


def refuse_unsupported(fields: Fields) -> None:
    """
    Raises:
        RequestError: naming the first field that squall does not obey.
    """
    fields.ignore(*HARMLESS)
    for name, neutral in REFUSED.items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            hint = "; only {'type': 'text'} is" if name == "response_format" else ""
            raise RequestError(f"{name}: not supported{hint}", param=name, code="unsupported_parameter")
