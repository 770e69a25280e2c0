"""What runs inside a box.

Every box is a fresh interpreter, so what these modules import is paid for by every verdict:
`typing`, `collections` and `struct` together cost as much processor time as the interpreter's own
start. So they import what it has loaded anyway, and two small modules of C; types are for the
checker alone, behind a TYPE_CHECKING of their own, as even the name would import `typing`.
"""
