"""Speed, side by side in one run: `python -m bench.NAME`. METHODOLOGY.md says what each figure means."""
