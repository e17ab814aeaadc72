"""Every word that machines use survives the wire, whatever it says."""

from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from squall.core.actions import AnyAction, LoadWeights
from squall.core.events import AnyEvent, Submitted
from squall.core.fleet_view import Place, Transfer
from squall.core.types import Request
from squall.live.activations import ActivationsOffer
from squall.live.engine.interface import Job, Sampling, TokenOut
from squall.live.rpc import convert
from squall.live.rpc.convert import Peer, ReplicaLoad, WeightsMoved
from squall.live.rpc.generated import squall_pb2 as pb
from squall.live.transport.kv import KvOffer, Pool

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**31 - 1),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    NoneType: st.none(),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold."""
    if hint in PLAIN:
        return PLAIN[hint]
    if get_origin(hint) in (Union, UnionType):
        return st.one_of([values_of(part) for part in get_args(hint)])
    if get_origin(hint) is tuple:
        return st.lists(values_of(get_args(hint)[0]), max_size=4).map(tuple)
    if get_origin(hint) is dict:
        key, value = get_args(hint)
        return st.dictionaries(values_of(key), values_of(value), min_size=1, max_size=4)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    return st.deferred(lambda: structs(hint))


@cache
def structs(struct: type[Struct]) -> st.SearchStrategy[Any]:
    return st.builds(
        struct, **{name: values_of(hint) for name, hint in get_type_hints(struct).items() if not name.startswith("_")}
    )


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("struct", get_args(AnyEvent), ids=lambda s: s.__name__)
@given(data=st.data())
def test_every_event_survives_the_wire(struct: type[Struct], data: st.DataObject) -> None:
    event = data.draw(structs(struct))
    assert convert.event_from_message(over_the_wire(convert.event_to_message(event))) == event


@pytest.mark.parametrize("struct", get_args(AnyAction), ids=lambda s: s.__name__)
@given(data=st.data())
def test_every_action_survives_the_wire(struct: type[Struct], data: st.DataObject) -> None:
    action = data.draw(structs(struct))
    assert convert.action_from_message(over_the_wire(convert.action_to_message(action))) == action


@pytest.mark.parametrize("struct", [Job, Sampling, ReplicaLoad, Peer, WeightsMoved, ActivationsOffer])
@given(data=st.data())
def test_a_requests_data_survives_the_wire(struct: type[Struct], data: st.DataObject) -> None:
    value = data.draw(structs(struct))
    assert convert.from_message(over_the_wire(convert.to_message(value)), struct) == value


def alternatives_only_beside_a_logprob(out: TokenOut) -> bool:
    return out.logprob is not None or not out.top


@given(st.lists(structs(TokenOut).filter(alternatives_only_beside_a_logprob), max_size=3))
def test_the_tokens_of_a_step_survive_the_wire(tokens: list[TokenOut]) -> None:
    assert convert.tokens_from_message(over_the_wire(convert.tokens_to_message(tokens))) == tokens


def test_the_schema_has_every_field_of_every_word_and_no_other() -> None:
    for struct in (*get_args(AnyEvent), *get_args(AnyAction), Request, Job, Sampling, ReplicaLoad, Peer, WeightsMoved):
        assert set(pb.DESCRIPTOR.message_types_by_name[struct.__name__].fields_by_name) == set(struct.__struct_fields__)


def test_hashes_instants_and_negative_numbers_keep_all_their_bits() -> None:
    request = Request(id=2**40, arrived_at=2**62, num_prompt_tokens=1, max_output_tokens=1, block_hashes=(2**63 - 1,), session=-5)
    message = convert.to_replica(Submitted(request))
    assert convert.event_from_message(over_the_wire(message).event) == Submitted(request)


def test_a_request_travels_with_its_data_and_an_action_without() -> None:
    job = Job(request=1, prompt=(1, 2), sampling=Sampling(max_tokens=3))
    request = Request(id=1, arrived_at=0, num_prompt_tokens=2, max_output_tokens=3)
    assert convert.from_message(convert.to_replica(Submitted(request), job).job, Job) == job
    assert not convert.to_replica(LoadWeights(replica=0, transfer=Transfer("m", Place("store"), (0,), "disk"))).HasField("job")


def test_an_order_for_weights_travels_with_where_its_peers_are() -> None:
    peers = (Peer(3, ("shm://a", "tcp://127.0.0.1:1")), Peer(5, ()))
    message = over_the_wire(convert.to_replica(LoadWeights(0, Transfer("m", Place("gpu", 3), (0,), "p2p")), peers=peers))
    assert tuple(convert.from_message(peer, Peer) for peer in message.peers) == peers


def test_a_word_from_a_newer_version_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="without a known event"):
        convert.event_from_message(pb.Event())


@given(structs(KvOffer))
def test_offers_of_kv(offer: KvOffer) -> None:
    assert convert.from_message(over_the_wire(convert.to_message(offer)), KvOffer) == offer


def test_checksums_of_all_64_bits() -> None:
    offer = KvOffer(1, 0, 2, 5, (3,), (2**64 - 1, 0), Pool(2, 8, 64, 2), ("shm://a",), 0, 1, 2**63 - 1)
    assert convert.from_message(over_the_wire(convert.to_message(offer)), KvOffer) == offer
