"""The README and the guides say what is true: their blocks run, their links lead somewhere."""

import re
from pathlib import Path

import pytest
from blocks import SKIP, Block, blocks, prints, run

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, tmp_path):
    for block in blocks((ROOT / page).read_text()):
        run(block, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text()
    targets = [t for t in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in t]
    targets += re.findall(r'<img[^>]* src="([^":]+)"', text)
    assert not [t for t in targets if not ((ROOT / page).parent / t).exists()]


PAGE = f"""# Page

```bash
echo one
echo two
```
```text
one
...
```

{SKIP}
```bash
make test
```

```text
no output of the block above
```

```python
print(3)
```
"""


def test_blocks_are_found_with_their_output():
    assert [(b.tag, b.text, b.line, b.output) for b in blocks(PAGE)] == [
        ("bash", "echo one\necho two\n", 3, "one\n...\n"),
        ("python", "print(3)\n", 21, None),
    ]


def test_a_long_block_without_the_comment_is_refused():
    with pytest.raises(AssertionError, match="line 1"):
        blocks("```bash\nmake test\n```\n")


def test_blocks_share_a_folder_and_outputs_are_compared(tmp_path):
    run(Block(tag="bash", text="echo kept > file", line=1, output=None), tmp_path)
    run(Block(tag="python", text="print(open('file').read())", line=2, output="kept\n"), tmp_path)
    with pytest.raises(AssertionError, match="line 3"):
        run(Block(tag="bash", text="cat file", line=3, output="lost"), tmp_path)
    with pytest.raises(AssertionError, match="failed"):
        run(Block(tag="bash", text="false; true", line=4, output=None), tmp_path)


def test_dots_stand_for_any_lines():
    assert prints("a\nb\nc\n", "a\n...\nc")
    assert prints("a  \n", "a")
    assert not prints("a\nb\n", "a")
