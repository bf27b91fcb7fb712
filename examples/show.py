"""Print the first answers of an answers file: `python examples/show.py answers.jsonl [HOW_MANY]`."""

import json
import sys
from itertools import islice
from pathlib import Path


def main() -> None:
    path, how_many = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with path.open(encoding="utf-8") as lines:
        for line in islice(lines, how_many):
            record = json.loads(line)
            text = record["text"] if "text" in record else f"error: {record['error']['message']}"
            print(f"  {record['id']}: {' '.join(text.split())}")


if __name__ == "__main__":
    main()
