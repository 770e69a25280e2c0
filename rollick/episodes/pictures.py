"""Pictures of an episode: an animated GIF, or a PNG with one image for each response.

    EpisodeTrace (tile grids, or the text of the observations) -> images -> .gif or .png

Tiles are drawn as plain shapes; an unknown tile shows the first letters of its name. Needs Pillow.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw

from rollick.envs.base import TileGrid
from rollick.episodes.in_process import EpisodeTrace
from rollick.errors import EnvError

CELL = 40
FLOOR, ICE, WATER = "#f3efe6", "#d9ecf7", "#22547a"
GROUND = {"goal": ICE, "start": ICE, "ice": ICE, "hole": WATER, "drowned": WATER} | {
    "arrived": "#bfe6b5", "wall": "#6b5b53", "box": FLOOR,
}  # fmt: skip
TEXT_COLUMNS, TEXT_LINES = 80, 24
FRAME_MS = 500
COLUMNS = 8
"""Images in a row of a PNG."""
Drawing = ImageDraw.ImageDraw


def save_episode(path: Path, trace: EpisodeTrace) -> None:
    images = [
        draw_grid(grid) if grid is not None else draw_text(response.text)
        for grid, response in zip(trace.grids, trace.responses, strict=True)
    ]
    if not images:
        raise EnvError(f"the episode of seed {trace.seed} has nothing to draw: {trace.error}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        first, *rest = images
        first.save(path, save_all=True, append_images=rest, duration=FRAME_MS, loop=0)
    elif path.suffix == ".png":
        _contact_sheet(images).save(path)
    else:
        raise EnvError(f"{path} is neither .gif nor .png", fix="choose one of them")


def draw_grid(grid: TileGrid) -> Image.Image:
    height, width = len(grid), max(len(row) for row in grid)
    image = Image.new("RGB", (width * CELL, height * CELL), FLOOR)
    drawing = ImageDraw.Draw(image)
    for y, row in enumerate(grid):
        for x, tile in enumerate(row):
            _draw_tile(drawing, tile, x * CELL, y * CELL)
    return image


def draw_text(text: str) -> Image.Image:
    lines = [part for line in text.split("\n") for part in (wrap(line, TEXT_COLUMNS) or [""])]
    image = Image.new("RGB", (TEXT_COLUMNS * 6 + 20, TEXT_LINES * 14 + 20), "white")
    drawing = ImageDraw.Draw(image)
    for number, line in enumerate(lines[:TEXT_LINES]):
        # Pillow's default font has only Latin letters.
        latin = line.encode("latin-1", "replace").decode("latin-1")
        drawing.text((10, 10 + 14 * number), latin, fill="black")
    return image


def _draw_tile(drawing: Drawing, tile: str, x: int, y: int) -> None:
    drawing.rectangle((x, y, x + CELL - 1, y + CELL - 1), GROUND.get(tile, FLOOR), "#c9c2b5")

    def inside(share: float) -> tuple[float, float, float, float]:
        edge = CELL * share
        return (x + edge, y + edge, x + CELL - edge, y + CELL - edge)

    if tile in ("target", "standing", "done"):
        drawing.ellipse(inside(0.3), outline="#c0392b", width=3)
    if tile in ("box", "done"):
        drawing.rectangle(inside(0.18), "#7fb069" if tile == "done" else "#d9a05b", "#7a5427", 3)
    if tile in ("player", "standing", "arrived", "drowned"):
        colour = "#8fa3b3" if tile == "drowned" else "#3b6fb5"
        drawing.ellipse(inside(0.22), colour, "#1d3f6e", 2)
    if tile == "goal":
        left, top, right, bottom = inside(0.25)
        drawing.polygon([(left, bottom), (left, top), (right, (top + bottom) / 2)], "#2e8b57")
    if tile not in KNOWN_TILES:
        drawing.text((x + 4, y + CELL // 3), tile[:5], fill="black")


KNOWN_TILES = {*GROUND, "floor", "target", "done", "player", "standing"}


def _contact_sheet(images: list[Image.Image]) -> Image.Image:
    width = max(image.width for image in images) + 8
    height = max(image.height for image in images) + 8
    columns = min(COLUMNS, len(images))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        sheet.paste(image, (column * width + 4, row * height + 4))
    return sheet
