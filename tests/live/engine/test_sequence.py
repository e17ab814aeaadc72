"""When a sequence ends and what of its text may be shown, with a tokenizer whose tokens are bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.live.engine.interface import Job, Sampling, TokenOut
from squall.live.engine.sequence import SequenceState, TextStream
from squall.live.engine.tokenizer import ByteTokenizer

END = ByteTokenizer.END


def state_of(prompt: str = "hi", output: tuple[int, ...] = (), max_model_len: int = 1000, **sampling: object) -> SequenceState:
    given = Sampling(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    return SequenceState(Job(7, tuple(prompt.encode()), given, output), ByteTokenizer(), max_model_len)


def say(state: SequenceState, text: str | bytes) -> list[TokenOut]:
    """Bytes as tokens, until the sequence ends."""
    outs = []
    for token in text if isinstance(text, bytes) else text.encode():
        outs.append(state.accept(token))
        if state.finished:
            break
    return outs


def test_text_comes_token_by_token_and_ends_at_the_limit() -> None:
    outs = say(state_of(max_tokens=3), "abcdef")
    assert [(out.text, out.finish) for out in outs] == [("a", None), ("b", None), ("c", "length")]
    assert [out.request for out in outs] == [7, 7, 7]


def test_the_context_ends_a_sequence_too() -> None:
    outs = say(state_of(prompt="12345", max_model_len=7), "abcdef")
    assert [out.finish for out in outs] == [None, "length"]


def test_a_character_is_never_split() -> None:
    outs = say(state_of(max_tokens=9), "é€😀")
    assert [out.text for out in outs] == ["", "é", "", "", "€", "", "", "", "😀"]


def test_what_is_no_character_shows_as_such_once_that_is_certain() -> None:
    assert [out.text for out in say(state_of(), b"\xc3A")] == ["", "�A"]
    assert [out.text for out in say(state_of(max_tokens=2), b"a\xe2")] == ["a", "�"]


def test_the_end_token_ends_it_without_showing() -> None:
    state = state_of(skip_special_tokens=False)
    say(state, "ab")
    out = state.accept(END)
    assert (out.text, out.finish, out.stop_reason) == ("", "stop", None)


def test_the_end_token_is_like_any_other_where_it_is_to_be_ignored() -> None:
    state = state_of(ignore_eos=True, skip_special_tokens=False, max_tokens=2)
    assert [(state.accept(token).text, state.finished) for token in (END, 65)] == [("<|end|>", False), ("A", True)]


def test_special_tokens_are_skipped_where_that_is_wanted() -> None:
    assert state_of().accept(ByteTokenizer.BEGIN).text == ""
    assert state_of(skip_special_tokens=False).accept(ByteTokenizer.BEGIN).text == "<|begin|>"


def test_a_stop_token_ends_it_and_is_named() -> None:
    outs = say(state_of(stop_token_ids=(ord("c"),)), "abcd")
    assert [(out.text, out.finish, out.stop_reason) for out in outs][-1] == ("", "stop", ord("c"))


def test_a_stop_string_never_shows_not_even_in_part() -> None:
    outs = say(state_of(stop=("STOP",)), "a STUSTOP no")
    assert [out.text for out in outs] == ["a", " ", "", "", "STU", "", "", "", ""]
    assert (outs[-1].finish, outs[-1].stop_reason) == ("stop", "STOP")


def test_the_first_stop_string_in_the_text_counts() -> None:
    outs = say(state_of(stop=("bcd", "b")), "abcd")
    assert ("".join(out.text for out in outs), outs[-1].stop_reason) == ("a", "b")


def test_what_was_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    outs = say(state_of(stop=("STOP",), max_tokens=3), "STO")
    assert [(out.text, out.finish) for out in outs] == [("", None), ("", None), ("STO", "length")]
    state = state_of(stop=("STOP",))
    say(state, "ST")
    assert state.accept(END).text == "ST"


def test_nothing_ends_it_before_min_tokens_but_the_limit() -> None:
    state = state_of(min_tokens=3, stop=("b",), stop_token_ids=(ord("c"),))
    assert state.forbidden == {END, ord("c")}
    assert [(out.text, out.finish) for out in say(state, "abxb")] == [("a", None), ("b", None), ("x", None), ("", "stop")]
    assert state.forbidden == frozenset()


def test_a_stop_string_that_began_before_min_tokens_counts_and_does_not_show() -> None:
    outs = say(state_of(min_tokens=2, stop=("ab",)), "ab")
    assert [(out.text, out.finish) for out in outs] == [("", None), ("", "stop")]


def test_logprobs_carry_text_and_bytes_of_each_token() -> None:
    out = state_of().accept(0xC3, -0.5, [(0xC3, -0.5), (65, -1.5)])
    assert out.logprob is not None
    assert (out.logprob.token, out.logprob.text, out.logprob.bytes, out.logprob.logprob) == (0xC3, "�", b"\xc3", -0.5)
    assert [(entry.text, entry.logprob) for entry in out.top] == [("�", -0.5), ("A", -1.5)]
    assert state_of().accept(65).logprob is None


@pytest.mark.parametrize(("text", "min_tokens"), [("a€ STUSTOP no", 0), ("STOP STUSTOP no", 6)])
def test_a_continued_sequence_goes_on_as_if_nothing_had_happened(text: str, min_tokens: int) -> None:
    whole = say(state_of(stop=("STOP",), min_tokens=min_tokens), text)
    assert whole[-1].finish == "stop"
    for cut in range(len(whole)):
        said = tuple(out.token for out in whole[:cut])
        state = state_of(stop=("STOP",), min_tokens=min_tokens, output=said)
        assert say(state, text.encode()[cut:]) == whole[cut:]


@given(
    st.text(alphabet="ab€\0", max_size=30),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_the_text_is_what_comes_before_the_first_stop_string_however_it_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    stream = TextStream(stops)
    raw = text.encode()
    shown, stop = "", None
    while raw and stop is None:
        size = data.draw(st.integers(1, len(raw)))
        more, stop = stream.push(raw[:size], may_stop=True)
        raw = raw[size:]
        shown += more
        assert not any(s in shown for s in stops)
    if stop is None:
        shown += stream.flush()
    # A longer piece may bring two stop strings at once; then the first in the text counts, as for short pieces
    # the first that is complete.
    ends = [text.find(s) for s in stops if s in text]
    assert (stop is None) == (not ends)
    assert text.startswith(shown)
    if stop is None:
        assert shown == text
    else:
        assert text[len(shown) :].startswith(stop)
