"""Pictures of an episode: a GIF that moves, or a PNG with its moments side by side.

    Episode (frames, or texts where an environment draws none) -> images -> .gif or .png

Tiles are drawn with plain shapes; an environment of its own kind names the tiles that it uses, and
what is not known is drawn as its first letters. Needs Pillow.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw

from rollick.envs.base import Frame
from rollick.envs.play import Episode
from rollick.errors import EnvError

CELL = 40
GROUND = {
    "ice": "#d9ecf7",
    "hole": "#22547a",
    "goal": "#d9ecf7",
    "start": "#d9ecf7",
    "drowned": "#22547a",
    "arrived": "#bfe6b5",
    "wall": "#6b5b53",
    "box": "#f3efe6",
}
FLOOR = "#f3efe6"
TEXT_COLUMNS, TEXT_LINES = 80, 24
MILLISECONDS = 500
COLUMNS = 8
"""Moments in a row of a PNG."""
Drawing = ImageDraw.ImageDraw


def save_episode(path: Path, episode: Episode) -> None:
    """Write the episode as .gif or .png."""
    images = [
        draw_frame(frame) if frame is not None else draw_text(moment.text)
        for frame, moment in zip(episode.frames, episode.moments, strict=True)
    ]
    if not images:
        raise EnvError(f"the episode of seed {episode.seed} has no moment to draw")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        first, *rest = images
        first.save(path, save_all=True, append_images=rest, duration=MILLISECONDS, loop=0)
    elif path.suffix == ".png":
        _sheet(images).save(path)
    else:
        raise EnvError(f"{path} is neither .gif nor .png", fix="choose one of them")


def draw_frame(frame: Frame) -> Image.Image:
    height, width = len(frame.rows), max(len(row) for row in frame.rows)
    image = Image.new("RGB", (width * CELL, height * CELL), FLOOR)
    drawing = ImageDraw.Draw(image)
    for y, row in enumerate(frame.rows):
        for x, tile in enumerate(row):
            _draw_tile(drawing, tile, x * CELL, y * CELL)
    return image


def draw_text(text: str) -> Image.Image:
    lines = [part for line in text.split("\n") for part in (wrap(line, TEXT_COLUMNS) or [""])]
    image = Image.new("RGB", (TEXT_COLUMNS * 6 + 20, TEXT_LINES * 14 + 20), "white")
    drawing = ImageDraw.Draw(image)
    for number, line in enumerate(lines[:TEXT_LINES]):
        # Pillow's own small font has Latin letters only.
        shown = line.encode("latin-1", "replace").decode("latin-1")
        drawing.text((10, 10 + 14 * number), shown, fill="black")
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
    if tile not in KNOWN:
        drawing.text((x + 4, y + CELL // 3), tile[:5], fill="black")


KNOWN = {*GROUND, "floor", "target", "done", "player", "standing"}


def _sheet(images: list[Image.Image]) -> Image.Image:
    """The images in rows, from left to right."""
    width = max(image.width for image in images) + 8
    height = max(image.height for image in images) + 8
    columns = min(COLUMNS, len(images))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        sheet.paste(image, (column * width + 4, row * height + 4))
    return sheet
