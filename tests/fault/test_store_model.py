"""Random calls against a dictionary: what hits is right, and the index agrees with a recount after each step."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

sys.path.insert(0, str(Path(__file__).parent))
import store_load as load

CAPACITY = 8 << 20
numbers = st.integers(0, 11)
lengths = st.integers(1, 30)


class StoreMachine(RuleBasedStateMachine):
    """Knows which pages were put; the store may have evicted any, and must have no others."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name) / "store"
        self.store = load.open_store(self.folder, CAPACITY)
        self.put: set[bytes] = set()

    @rule(number=numbers, pages=lengths)
    def write(self, number: int, pages: int) -> None:
        refs = load.chain(number, pages)
        tally = load.write(self.store, refs)
        assert tally.keys() <= {"stored", "present", "no_room"}
        assert tally["no_room"] == 0 or pages * len(load.payload_of(refs[0])) > CAPACITY // 2
        self.put.update(ref.key for ref in refs)

    @rule(number=numbers, pages=lengths)
    def read(self, number: int, pages: int) -> None:
        refs = load.chain(number, pages)
        there = self.store.count_prefix([ref.key for ref in refs])
        assert all(ref.key in self.put for ref in refs[:there])
        tally = load.read(self.store, refs)
        assert tally.keys() <= {"hit", "absent"}
        assert tally["hit"] >= there

    @rule(number=numbers, at=lengths)
    def delete(self, number: int, at: int) -> None:
        ref = load.chain(number, at)[-1]
        assert self.store.delete([ref.key]) in ({0, 1} if ref.key in self.put else {0})
        self.put.discard(ref.key)

    @rule()
    def reopen(self) -> None:
        pages = self.store.stats().pages
        self.store.close()
        self.store = load.open_store(self.folder, CAPACITY)
        assert self.store.stats().pages == pages

    @rule()
    def rebuild(self) -> None:
        pages = self.store.stats().pages
        self.store.close()
        (self.folder / "index.lmdb").unlink()
        self.store = load.open_store(self.folder, CAPACITY)
        assert self.store.stats().pages >= pages
        self.put = {ref.key for number in range(12) for ref in load.chain(number, 30)}  # what was deleted may be back

    @rule()
    def compact(self) -> None:
        self.store.compact()

    @rule()
    def clear(self) -> None:
        self.store.clear(load.NAMESPACE)
        assert self.store.stats().pages == 0
        self.put.clear()

    @invariant()
    def sums_agree(self) -> None:
        assert self.store.audit() == ()
        assert load.disk_bytes(self.folder) <= CAPACITY

    def teardown(self) -> None:
        self.store.close()
        self.scratch.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=20, deadline=None, database=None)
test_random_calls_agree_with_the_model = StoreMachine.TestCase
