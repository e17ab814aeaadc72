from hypothesis import given
from hypothesis import strategies as st

from squall.core.decodes import DecodeGroup, Work
from squall.core.types import FOREVER, Request


def work(id: int, target: int, size: int = 4) -> Work:
    request = Request(id, 0, num_prompt_tokens=target, max_output_tokens=99)
    return Work(request, (), target, generated=1, computed=target, blocks=-(-target // size))


def advance(group: DecodeGroup, steps: int) -> int:
    """Do so many steps; returns the blocks that they take."""
    taken = group.blocks(steps)
    group.step += steps
    return taken


def context(group: DecodeGroup) -> int:
    """Tokens that all attend to in the next step."""
    return group.base + group.size * group.step


def test_a_request_attends_to_its_prompt_and_its_own_new_token() -> None:
    group = DecodeGroup(block_size=4)
    group.join(work(0, target=6))
    assert (group.size, context(group)) == (1, 7)
    advance(group, 3)
    assert context(group) == 10


def test_a_full_last_block_makes_the_first_step_take_a_new_one() -> None:
    group = DecodeGroup(block_size=4)
    group.join(work(0, target=8))
    assert group.next_blocks() == 1
    assert advance(group, 1) == 1
    assert [advance(group, 1) for _ in range(5)] == [0, 0, 0, 1, 0]


def test_who_leaves_knows_what_it_generated_and_holds() -> None:
    group = DecodeGroup(block_size=4)
    first = work(0, target=6)
    group.join(first)
    advance(group, 11)
    assert group.leave(first) == 17
    assert (first.generated, first.blocks, first.group) == (12, 5, None)
    assert (group.size, context(group), group.next_blocks()) == (0, 0, 0)


def test_an_empty_group_needs_nothing_for_ever() -> None:
    group = DecodeGroup(block_size=4)
    assert group.blocks(10**9) == 0
    assert group.steps_within(0, FOREVER) == FOREVER


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=8),
    st.integers(1, 40),
    st.integers(0, 60),
)
def test_sums_equal_what_the_requests_add_up_to(size: int, story: list[tuple[int, int]], steps: int, room: int) -> None:
    group = DecodeGroup(size)
    members: list[Work] = []
    for id, (target, pause) in enumerate(story):
        members.append(work(id, target, size))
        group.join(members[-1])
        advance(group, pause)
    pauses = [pause for _, pause in story]

    def length(member: Work) -> int:
        return member.target + sum(pauses[member.request.id :])

    def held(tokens: int) -> int:
        return -(-tokens // size)

    assert context(group) == sum(length(member) + 1 for member in members)
    assert group.next_blocks() == sum(length(member) % size == 0 for member in members)
    assert group.blocks(steps) == sum(held(length(m) + steps) - held(length(m)) for m in members)
    fitting = group.steps_within(room, FOREVER)
    assert group.blocks(fitting) <= room
    if fitting < size:
        assert group.blocks(fitting + 1) > room
