"""Three messages to one ClientApp run in three processes, and a module's counter stays at 1."""

from stock import run

said = run(messages=3, state_mb=0)
print(said)
assert len({one["pid"] for one in said}) == 3
assert [one["in module"] for one in said] == [1, 1, 1]
assert [one["in context.state"] for one in said] == [1, 2, 3]
