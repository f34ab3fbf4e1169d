"""The reader of code blocks, and how shell blocks are cut into commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_markdown import read_blocks
from support_stage import commands

TEXT = """\
# A title

```Python
one = 1

two = 2
```

Some text
    that is indented without an empty line before it

    echo indented

      more
1. item

   ~~~ bash
   echo `date`
   ~~~
``` not a fence, as it has ` in it
````
```
````
"""


def test_blocks_have_language_text_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(TEXT)
    found = [(block.language, block.line, block.text) for block in read_blocks(path)]
    assert found == [
        ("python", 4, "one = 1\n\ntwo = 2\n"),
        ("", 12, "echo indented\n\n  more\n"),
        ("bash", 18, "echo `date`\n"),
        ("", 22, "```\n"),
    ]


def test_a_fence_without_an_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("```\necho\n")
    with pytest.raises(ValueError, match=r"a\.md:1: the fence is never closed"):
        read_blocks(path)


def test_commands_go_on_over_quotes_and_escaped_line_ends() -> None:
    text = "# one\ncurl -d '{\"a\":\n  1}' # why\nb \\\n  --c\n\nd\n"
    assert commands(text) == ["curl -d '{\"a\":\n  1}' # why\n", "b \\\n  --c\n", "d\n"]
