from squall.workload.formats import BAILIAN, LMCACHE, SQUALL
from squall.workload.turns import Turns, find_turns


def test_rows_that_name_the_turn_before_form_conversations() -> None:
    said: list[str] = []
    turns = find_turns(BAILIAN, {"chat_id": [7, 8, 9, 10], "parent_chat_id": [-1, 7, -1, 8]}, said.append)
    assert (turns.sessions, turns.parents, said) == ([1, 1, 2, 1], [-1, 0, -1, 1], [])


def test_a_turn_before_that_is_missing_itself_or_later_is_none_and_it_is_said() -> None:
    said: list[str] = []
    turns = find_turns(BAILIAN, {"chat_id": [7, 8, 9], "parent_chat_id": [7, 9, 99]}, said.append)
    assert (turns.sessions, turns.parents) == ([1, 2, 3], [-1, -1, -1])
    assert said == ["3 rows follow a turn that is not above them; they count as first turns"]


def test_without_names_of_the_turn_before_every_row_is_a_first_turn() -> None:
    assert find_turns(BAILIAN, {"chat_id": [7, 8], "parent_chat_id": [None, None]}, print).parents == [-1, -1]
    assert find_turns(BAILIAN, {"chat_id": [7, 8]}, print).sessions == [1, 2]


def test_rows_of_one_session_follow_each_other_in_order_of_arrival() -> None:
    turns = find_turns(SQUALL, {"session": ["a", "b", None, "a", ""]}, print)
    assert (turns.sessions, turns.parents) == ([1, 2, 0, 1, 0], [-1, -1, -1, 0, -1])


def test_numbered_turns_follow_their_numbers_also_backwards_in_time() -> None:
    columns = {"project": ["p"] * 3, "session_id": ["a"] * 3, "turn": ["1", "0", "2"]}
    turns = find_turns(LMCACHE, {**columns, "common_prefix_chars_with_previous_turn": [9, 0, 3]}, print)
    assert (turns.sessions, turns.parents, turns.shared) == ([1, 1, 1], [1, -1, 0], [2, 0, 0])


def test_the_same_session_of_another_project_is_another() -> None:
    turns = find_turns(LMCACHE, {"project": ["p", "q"], "session_id": ["a", "a"], "turn": ["0", "1"]}, print)
    assert (turns.sessions, turns.parents) == ([1, 2], [-1, -1])


def test_any_value_may_name_a_session_or_a_turn() -> None:
    assert find_turns(SQUALL, {"session": [7, "7", [1], 2.5]}, print).sessions == [1, 1, 2, 3]
    assert find_turns(BAILIAN, {"chat_id": ["a", 8], "parent_chat_id": [-1, "a"]}, print).parents == [-1, 0]
    assert find_turns(BAILIAN, {"chat_id": [[1], 8], "parent_chat_id": [[2], "8"]}, lambda _: None).parents == [-1, -1]


def test_a_trace_without_sessions_has_none() -> None:
    assert find_turns(SQUALL, {}, print) == find_turns(SQUALL, {"session": [None, ""]}, print) == Turns()
