"""Code that runs inside boxes.

Every box is a new interpreter, so the imports of these modules cost time in every run: `typing`,
`collections` and `struct` together take as much as starting the interpreter. These modules import
only what the interpreter has already loaded, and two small C modules. Types are for the type
checker, behind a local TYPE_CHECKING: importing the real one would import `typing`.
"""
