"""What a browser makes of the page: in light and dark, on a telephone and on a wide screen."""

import html
import json
import re
import shutil
import subprocess

import pytest

from lightning_dct.commands import main
from made_up_runs import rows_of, write_csv

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
WIDTHS = (390, 768, 1400)
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--dump-dom",
]  # fmt: skip
MEASURE = """
const measured = [];
for (const frame of document.querySelectorAll("iframe")) {
  const inside = frame.contentDocument, view = frame.contentWindow, root = inside.documentElement;
  const outside = [...inside.querySelectorAll("body *")].filter((element) => {
    if (element.closest(".scroll") || element.closest("defs, legend")) return false;
    const box = element.getBoundingClientRect();
    return box.width > 0 && (box.left < -0.5 || box.right > view.innerWidth + 0.5);
  });
  const beyondFigure = [...inside.querySelectorAll("figure svg text")].filter((element) => {
    const box = element.getBoundingClientRect(), card = element.closest("figure").getBoundingClientRect();
    return box.left < card.left || box.right > card.right || box.top < card.top || box.bottom > card.bottom;
  });
  measured.push({
    width: view.innerWidth, scrollWidth: root.scrollWidth,
    outside: outside.map((element) => element.outerHTML.slice(0, 80)),
    beyondFigure: beyondFigure.map((element) => element.textContent),
    smallestText: Math.min(
      ...[...inside.querySelectorAll("figure svg text")].map((text) => parseFloat(view.getComputedStyle(text).fontSize)
        * text.ownerSVGElement.getBoundingClientRect().width / text.ownerSVGElement.viewBox.baseVal.width)),
    requests: view.performance.getEntriesByType("resource").map((entry) => entry.name),
    charts: [...inside.querySelectorAll("figure svg")].filter((svg) => svg.getBoundingClientRect().height > 100).length,
    background: view.getComputedStyle(inside.body).backgroundColor,
    ink: view.getComputedStyle(inside.querySelector("figure svg text")).fill,
  });
}
document.body.textContent = JSON.stringify(measured);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chromium")
    long_name = "strategy.density=0.01 strategy.value_format=bf16 " + 60 * "x"
    write_csv(folder / "dct", rows_of(8.0), f"density: 0.03\n{80 * 'n'}: {200 * 'v'}\n")
    write_csv(folder / "split", rows_of(131.0, inside=True), "density: 0.1\n")
    write_csv(folder / "plain", rows_of(None))
    words = [str(folder / "dct"), f"{long_name}={folder / 'split'}", str(folder / "plain")]
    assert main(["report", *words, "--output", str(folder / "report.html")]) == 0
    return (folder / "report.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_whole_at_every_width_and_asks_for_nothing(page, dark, tmp_path):
    frames = "".join(
        f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{html.escape(page)}"></iframe>'
        for width in WIDTHS
    )
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(
        '<!DOCTYPE html><meta name="color-scheme" content="light dark"><body>'
        f"{frames}<script>addEventListener('load', () => {{ {MEASURE} }})</script></body>"
    )
    colours = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [CHROMIUM, *OPTIONS, *colours, f"--user-data-dir={tmp_path / 'profile'}", str(wrapper)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    body = re.search(r"<body>(.*?)</body>", done.stdout, re.DOTALL)
    measured = json.loads(html.unescape(body[1]))
    assert [frame["width"] for frame in measured] == list(WIDTHS)
    for frame in measured:
        assert frame["scrollWidth"] <= frame["width"]
        assert frame["outside"] == []
        assert frame["beyondFigure"] == []
        assert frame["smallestText"] >= 9  # pixels
        assert frame["requests"] == []
        assert frame["charts"] == 15
        background, ink = (sum(map(int, re.findall(r"\d+", frame[name]))) for name in ("background", "ink"))
        assert (background < 100 and ink > 600) if dark else (background > 700 and ink < 150)
