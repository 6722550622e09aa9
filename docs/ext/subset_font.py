"""How docs/static/math.woff2 was made: STIX Two Math 2.11, less what no formula here needs (1.5 MB to 0.3 MB).

    pip install fonttools brotli ziamath          # ziamath has the font in its folder fonts
    python docs/ext/subset_font.py STIXTwoMath-Regular.ttf docs/static/math.woff2

The table MATH stays, with the tall forms of brackets and roots, which browsers need to make them fit what they enclose.
"""

import sys

from fontTools.subset import main

KEPT = [
    "0020-007E,00A0-00FF",  # ASCII and Latin-1
    "02C6-02DD,0300-036F,20D0-20EF",  # accents
    "0370-03FF",  # Greek
    "2016,2020-2027,2032-2037,2040,2061-2064",  # bars, dots, primes, invisible operators
    "2100-214F",  # letter-like: ℝ, ℓ
    "2190-22FF",  # arrows and operators
    "2308-230B,2329,232A,239B-23B9,23DC-23E1,25A0-25FF",  # tall brackets, braces above and below, shapes
    "27C0-27FF,2900-2AFF",  # more arrows, brackets and operators
    "1D400-1D59F,1D6A4-1D7D7",  # italic, bold and script letters; Greek ones; bold digits
]

if __name__ == "__main__":
    source, target = sys.argv[1:]
    unicodes = ",".join(f"U+{part}" for line in KEPT for part in line.split(","))
    main([source, f"--unicodes={unicodes}", "--layout-features=*", "--flavor=woff2", f"--output-file={target}"])
