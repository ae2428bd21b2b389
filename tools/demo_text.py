"""The demo's text: the King James Bible, from Debian's packages to chapters, chats and a word list.

Knows books, chapters, verses and who may see which chapter; knows nothing of tokens or models.

To get the text (public domain; 4.4 MB) and write it in the form the training script takes:

    apt-get install bible-kjv bible-kjv-text
    bible -f Gen1:1-Rev22:21 < /dev/null > dump.txt       # -f switches pretty-printing off: one verse a line
    python -m tools.demo_text dump.txt kjv.txt.xz

The canonical text is one block per chapter, blocks parted by an empty line: a heading ("Genesis 1"), then one
line per verse ("1 In the beginning ..."). A block is one document: its text ends where an end-of-text token stands.
"""

import argparse
import lzma
import random
import re
from dataclasses import dataclass
from pathlib import Path

# Debian's abbreviations in canonical order, and the names used here.
BOOKS = {
    **{"Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy"},
    **{"Josh": "Joshua", "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel", "1Ki": "1 Kings"},
    **{"2Ki": "2 Kings", "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra", "Neh": "Nehemiah"},
    **{"Est": "Esther", "Job": "Job", "Psa": "Psalms", "Prv": "Proverbs", "Eccl": "Ecclesiastes"},
    **{"SSol": "Song of Solomon", "Isa": "Isaiah", "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel"},
    **{"Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel", "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah"},
    **{"Mic": "Micah", "Nahum": "Nahum", "Hab": "Habakkuk", "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah"},
    **{"Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John", "Acts": "Acts"},
    **{"Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians", "Gal": "Galatians", "Eph": "Ephesians"},
    **{"Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians", "2Th": "2 Thessalonians"},
    **{"1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews"},
    **{"Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John", "3Jn": "3 John"},
    **{"Jude": "Jude", "Rev": "Revelation"},
}
NUM_CHAPTERS, NUM_VERSES = 1189, 31102
_DUMP_LINE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (.+)")
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")

Message = dict[str, str]


@dataclass(frozen=True)
class Split:
    """Chapters as text blocks. `heldout` is read once, at the very end; `validation` chooses the checkpoint."""

    train: list[str]
    validation: list[str]
    heldout: list[str]


def canonical_text(dump: str) -> str:
    """Debian's one-verse-a-line dump as the canonical text; a dump with a verse missing is refused."""
    blocks: list[list[str]] = []
    last_chapter = None
    for line in dump.strip().split("\n"):
        match = _DUMP_LINE.fullmatch(line.strip())
        if match is None or match[1] not in BOOKS:
            raise ValueError(f"dump: not a verse line: {line[:60]!r}; write it with `bible -f Gen1:1-Rev22:21`.")
        book, chapter, verse, text = match.groups()
        if (book, chapter) != last_chapter:
            blocks.append([f"{BOOKS[book]} {chapter}"])
            last_chapter = (book, chapter)
        blocks[-1].append(f"{verse} {text}")
    verses = sum(len(block) - 1 for block in blocks)
    if (len(blocks), verses) != (NUM_CHAPTERS, NUM_VERSES):
        raise ValueError(
            f"dump: {len(blocks)} chapters, {verses} verses; expected {NUM_CHAPTERS} and {NUM_VERSES}. "
            "Dump the whole text with `bible -f Gen1:1-Rev22:21`."
        )
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def read_text(path: Path) -> str:
    """The canonical text from a plain or an .xz file."""
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")


def split_chapters(text: str) -> Split:
    """Every 25th chapter is held out (4 %), every 50th in between validates (2 %): all kinds of book in each part."""
    chapters = text.strip().split("\n\n")
    return Split(
        train=[c for i, c in enumerate(chapters) if i % 25 != 12 and i % 50 != 25],
        validation=[c for i, c in enumerate(chapters) if i % 50 == 25],
        heldout=[c for i, c in enumerate(chapters) if i % 25 == 12],
    )


def chats(chapters: list[str], *, seed: int) -> list[list[Message]]:
    """Conversations of one to three turns over the verses of these chapters, some opened by a system message.

    A turn asks for a verse by its place ("Read Genesis 1:1", "Genesis 1:1"), or gives its first words
    ("Continue: In the beginning") and is answered with the rest. The text's own words are used throughout.
    """
    rng = random.Random(seed)
    turns: list[list[Message]] = []
    for chapter in chapters:
        heading, *verses = chapter.split("\n")
        for line in verses:
            number, verse = line.split(" ", 1)
            words = verse.split(" ")
            place = f"{heading}:{number}"
            question, answer = rng.choice([f"Read {place}", place]), verse
            turns.append([_message("user", question), _message("assistant", answer)])
            if len(words) >= 4:
                cut = rng.randint(2, len(words) - 2)
                question, answer = "Continue: " + " ".join(words[:cut]), " ".join(words[cut:])
                turns.append([_message("user", question), _message("assistant", answer)])
    rng.shuffle(turns)
    conversations: list[list[Message]] = []
    while turns:
        opening = [_message("system", "Answer with scripture.")] if rng.random() < 0.15 else []
        conversation = list(opening)
        for _ in range(min(rng.choice([1, 1, 2, 3]), len(turns))):
            conversation += turns.pop()
        conversations.append(conversation)
    return conversations


def words_of(text: str) -> list[str]:
    """Words in lower case, an inner apostrophe included ("aaron's")."""
    return [word.lower() for word in _WORD.findall(text)]


def vocabulary(chapters: list[str]) -> list[str]:
    """Every word of these chapters, sorted, once."""
    return sorted({word for chapter in chapters for word in words_of(chapter)})


def xz_size(text: str) -> int:
    """Bytes of the text as `xz -9e` writes it."""
    return len(lzma.compress(text.encode("utf-8"), preset=9 | lzma.PRESET_EXTREME))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the canonical text from a dump of Debian's bible program.")
    parser.add_argument("dump", type=Path)
    parser.add_argument("text", type=Path, help="the file to write, .xz")
    args = parser.parse_args()
    text = canonical_text(args.dump.read_text(encoding="utf-8"))
    args.text.write_bytes(lzma.compress(text.encode("utf-8"), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
