"""Our Structs to protobuf messages and back.

The schema mirrors the Structs name by name and field by field, so one walk over a Struct's fields serves them all; only
`TokenOut`, of which every step sends a batch, is written out. Knows no connection and no machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from msgspec import Struct

from squall.core.actions import Action, AnyAction
from squall.core.events import AnyEvent, Event
from squall.core.types import ReplicaId
from squall.live.engine.interface import Job, TokenLogprob, TokenOut
from squall.live.rpc.generated import squall_pb2 as pb

StructT = TypeVar("StructT", bound=Struct)


class ReplicaLoad(Struct, frozen=True):
    """A replica's state, sent at least once a second; also its heartbeat. Counters count since the session began."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_prefix_cache_queries: int  # prompt tokens looked up
    num_prefix_cache_hits: int  # of these, tokens found


class Peer(Struct, frozen=True):
    """Where a replica's weights and KV can be read, the fastest way first."""

    replica: ReplicaId
    addresses: tuple[str, ...]


class WeightsMoved(Struct, frozen=True):
    """How a replica got its weights.

    Attributes:
        kind: as `Transfer.kind`, of the order that brought the last of them.
        num_bytes: what came; what was there before is not counted.
        first_byte_s: from the order to the first chunk; seconds: from the first order to the last section's checksum.
        num_repaired: sections that came wrong, and again.
    """

    kind: str
    num_bytes: int
    first_byte_s: float
    seconds: float
    num_repaired: int = 0


# -- any Struct


def to_message(struct: Struct) -> Any:
    """The message of the same name, with every field of `struct` that is not None."""
    fields = {name: _to_value(value) for name in struct.__struct_fields__ if (value := getattr(struct, name)) is not None}
    return getattr(pb, type(struct).__name__)(**fields)


def from_message(message: Message, struct: type[StructT]) -> StructT:
    """The Struct of the same name as `message`."""
    return struct(**{name: read(message, name) for name, read in _readers(struct)})


def _to_value(value: Any) -> Any:
    match value:
        case Event():
            return event_to_message(value)  # type: ignore[arg-type]
        case Struct():
            return to_message(value)
        case Enum():
            return f"{type(value).__name__.upper()}_{value.name}"
        case tuple() if value and isinstance(value[0], Struct):
            return [_to_value(item) for item in value]
    return value


@cache
def _readers(struct: type[Struct]) -> tuple[tuple[str, Callable[[Message, str], Any]], ...]:
    """For every field of a Struct, how to read it from its message."""
    hints = get_type_hints(struct)
    return tuple((name, _reader(hints[name])) for name in struct.__struct_fields__)


def _reader(hint: Any) -> Callable[[Message, str], Any]:
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint) and hint is not AnyEvent:
        (inner,) = [part for part in get_args(hint) if part is not NoneType]
        if get_origin(inner) is dict:  # a map cannot be absent: none and empty mean the same
            return lambda message, name: dict(getattr(message, name)) or None
        convert = _converter(inner)
        return lambda message, name: convert(getattr(message, name)) if message.HasField(name) else None
    convert = _converter(hint)
    return lambda message, name: convert(getattr(message, name))


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Turns a message's value into one of type `hint`."""
    if hint == AnyEvent:
        return event_from_message
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if isinstance(item, type) and issubclass(item, Struct):
            return lambda values: tuple(from_message(value, item) for value in values)
        return tuple
    if isinstance(hint, type) and issubclass(hint, Struct):
        return lambda value: from_message(value, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        names = pb.DESCRIPTOR.enum_types_by_name[hint.__name__].values_by_number
        prefix = len(hint.__name__) + 1
        return lambda number: hint[names[number].name[prefix:]]
    return lambda value: value


# -- the unions


def _field_name(struct: type) -> str:
    """StepsDone is the field steps_done of its union."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", struct.__name__).lower()


@cache
def _names(union: Any) -> dict[type, str]:
    return {struct: _field_name(struct) for struct in get_args(union)}


@cache
def _types(union: Any) -> dict[str, type]:
    return {name: struct for struct, name in _names(union).items()}


def event_to_message(event: AnyEvent) -> pb.Event:
    return pb.Event(**{_names(AnyEvent)[type(event)]: to_message(event)})


def event_from_message(message: pb.Event) -> AnyEvent:
    """Raises ValueError for an event that this version does not know."""
    event: AnyEvent = _from_union(message, "event", _types(AnyEvent))
    return event


def action_to_message(action: AnyAction) -> pb.Action:
    return pb.Action(**{_names(AnyAction)[type(action)]: to_message(action)})


def action_from_message(message: pb.Action) -> AnyAction:
    """Raises ValueError for an action that this version does not know."""
    action: AnyAction = _from_union(message, "action", _types(AnyAction))
    return action


def _from_union(message: Message, union: str, types: dict[str, type]) -> Any:
    name = message.WhichOneof(union)
    if name is None:
        raise ValueError(f"a message without a known {union}; is the other side newer than this one?")
    return from_message(getattr(message, name), types[name])


# -- tokens: the one hot path


def tokens_to_message(tokens: Iterable[TokenOut]) -> pb.StepOutput:
    return pb.StepOutput(tokens=[_token_to_message(token) for token in tokens])


def tokens_from_message(message: pb.StepOutput) -> list[TokenOut]:
    return [_token_from_message(token) for token in message.tokens]


def _token_to_message(out: TokenOut) -> pb.TokenOut:
    message = pb.TokenOut(
        request=out.request, token=out.token, text=out.text, finish=out.finish, num_cached_tokens=out.num_cached_tokens
    )
    if isinstance(out.stop_reason, str):
        message.stop_string = out.stop_reason
    elif out.stop_reason is not None:
        message.stop_token = out.stop_reason
    if out.logprob is not None:
        message.logprob.CopyFrom(to_message(out.logprob))
        message.top.extend(to_message(top) for top in out.top)
    return message


def _token_from_message(message: pb.TokenOut) -> TokenOut:
    reason = message.WhichOneof("stop_reason")
    return TokenOut(
        request=message.request,
        token=message.token,
        text=message.text,
        finish=message.finish if message.HasField("finish") else None,
        stop_reason=getattr(message, reason) if reason else None,
        num_cached_tokens=message.num_cached_tokens,
        logprob=from_message(message.logprob, TokenLogprob) if message.HasField("logprob") else None,
        top=tuple(from_message(top, TokenLogprob) for top in message.top),
    )


# -- what travels on a session


def to_replica(
    message: AnyEvent | AnyAction, job: Job | None = None, peers: Iterable[Peer] = (), jobs: Iterable[Job] = ()
) -> pb.ToReplica:
    """An event (with its request's data, or its requests') or an action (with its peers, for a LoadWeights) for a replica."""
    data = to_message(job) if job is not None else None
    if isinstance(message, Action):
        return pb.ToReplica(action=action_to_message(message), job=data, peers=[to_message(peer) for peer in peers])
    return pb.ToReplica(event=event_to_message(message), job=data, jobs=[to_message(each) for each in jobs])
