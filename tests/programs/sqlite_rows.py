"""A database in memory, beside the same in a dictionary: `sqlite_rows.py ROWS ROUNDS`.

Each round changes, removes, adds and looks up rows by chance, and takes a part of it back. At the end of each the
database is checked by its own check and against the dictionary. Prints a line for each round.
"""

import hashlib
import random
import sqlite3
import sys


def value_of(key, turn):
    word = hashlib.blake2b(b"%d %d" % (key, turn), digest_size=16).digest()
    return (word * 64)[:50 + (key * 31 + turn) % 900]


def changed(database, chance, rows, turns, turn):
    """One round of changes; gives what the rows are then."""
    after = dict(turns)
    for _ in range(rows // 10):
        key = chance.randrange(rows)
        what = chance.random()
        if what < 0.2:
            database.execute("DELETE FROM rows WHERE key = ?", (key,))
            after.pop(key, None)
        elif what < 0.6:
            database.execute("REPLACE INTO rows VALUES (?, ?, ?)", (key, turn, value_of(key, turn)))
            after[key] = turn
        else:
            found = database.execute("SELECT turn, value FROM rows WHERE key = ?", (key,)).fetchone()
            expected = (after[key], value_of(key, after[key])) if key in after else None
            assert found == expected, (key, found, expected)
    return after


def compare(database, turns):
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    seen = 0
    digest = hashlib.blake2b()
    for key, turn, value in database.execute("SELECT key, turn, value FROM rows ORDER BY key"):
        assert turns.get(key) == turn and value == value_of(key, turn), key
        digest.update(value)
        seen += 1
    assert seen == len(turns), (seen, len(turns))
    return digest.hexdigest()[:16]


def main():
    rows, rounds = int(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(rows)
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.execute("CREATE TABLE rows (key INTEGER PRIMARY KEY, turn INTEGER, value BLOB)")
    database.execute("CREATE INDEX by_turn ON rows (turn, key)")
    database.execute("BEGIN")
    database.executemany("INSERT INTO rows VALUES (?, 0, ?)", ((key, value_of(key, 0)) for key in range(rows)))
    database.execute("COMMIT")
    turns = dict.fromkeys(range(rows), 0)
    for turn in range(1, rounds + 1):
        database.execute("BEGIN")
        kept = changed(database, chance, rows, turns, turn)
        database.execute("SAVEPOINT doubtful")
        changed(database, chance, rows, kept, -turn)
        database.execute("ROLLBACK TO doubtful")
        database.execute("COMMIT")
        turns = kept
        print("round", turn, len(turns), compare(database, turns), flush=True)
    print("ok", flush=True)


if __name__ == "__main__":
    main()
