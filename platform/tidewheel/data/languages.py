"""Programming languages, recognised by the names of files."""

from __future__ import annotations

import posixpath

_ENDINGS = {
    "Ada": "adb ads", "Assembly": "asm s", "Awk": "awk", "Batchfile": "bat cmd", "C": "c h", "C#": "cs csx",
    "C++": "cc cpp cxx c++ hh hpp hxx h++ ipp inl", "CMake": "cmake", "COBOL": "cob cbl cpy", "CSS": "css",
    "Clojure": "clj cljs cljc edn", "CoffeeScript": "coffee", "Common Lisp": "lisp lsp", "Crystal": "cr",
    "Cuda": "cu cuh", "Cython": "pyx pxd pxi", "D": "d", "Dart": "dart", "Dockerfile": "dockerfile", "Elixir": "ex exs",
    "Elm": "elm", "Emacs Lisp": "el", "Erlang": "erl hrl", "F#": "fs fsi fsx", "Fortran": "f f77 f90 f95 f03 f08 for",
    "GLSL": "glsl vert frag geom", "GraphQL": "graphql gql", "Go": "go", "Groovy": "groovy gradle", "HCL": "tf hcl",
    "HTML": "html htm xhtml", "Haskell": "hs lhs", "INI": "ini cfg", "Idris": "idr", "JSON": "json jsonc json5",
    "Java": "java", "JavaScript": "js jsx mjs cjs", "Jinja": "jinja j2", "Julia": "jl", "Kotlin": "kt kts",
    "Lean": "lean", "Less": "less", "Lua": "lua", "MATLAB": "matlab", "Makefile": "mk mak", "Markdown": "md markdown",
    "Meson": "meson", "Nim": "nim", "Nix": "nix", "OCaml": "ml mli", "Objective-C": "m", "Objective-C++": "mm",
    "PHP": "php phtml", "Pascal": "pas pp", "Perl": "pl pm", "PowerShell": "ps1 psm1 psd1", "Prolog": "pro",
    "Protocol Buffer": "proto", "Python": "py pyi pyw", "R": "r", "RMarkdown": "rmd", "Racket": "rkt",
    "Ruby": "rb rake", "Rust": "rs", "SCSS": "scss", "SQL": "sql", "SVG": "svg", "Sass": "sass",
    "Scala": "scala sc", "Scheme": "scm ss",
    "Shell": "sh bash zsh fish ksh", "Smalltalk": "st", "Solidity": "sol", "Standard ML": "sml", "Starlark": "bzl",
    "Stata": "do ado", "Svelte": "svelte", "Swift": "swift", "SystemVerilog": "sv svh", "TOML": "toml", "Tcl": "tcl",
    "TeX": "tex sty cls", "Text": "txt", "Thrift": "thrift", "TypeScript": "ts tsx mts cts", "VHDL": "vhd vhdl",
    "Verilog": "v vh", "Vim Script": "vim", "Visual Basic": "vb vbs", "Vue": "vue", "WebAssembly": "wat wast",
    "XML": "xml xsd xsl xslt", "YAML": "yaml yml", "Zig": "zig", "reStructuredText": "rst",
}
_NAMES = {
    "CMake": "cmakelists.txt", "Dockerfile": "dockerfile containerfile", "Go Module": "go.mod", "Groovy": "jenkinsfile",
    "Just": "justfile", "Makefile": "makefile gnumakefile", "Meson": "meson.build", "Ruby": "rakefile gemfile",
    "Starlark": "build build.bazel workspace workspace.bazel",
}
_OF_ENDING = {ending: language for language, endings in _ENDINGS.items() for ending in endings.split()}
_OF_NAME = {name: language for language, names in _NAMES.items() for name in names.split()}

LANGUAGES = tuple(sorted({*_ENDINGS, *_NAMES}))
"""All known languages."""


def language_of(path: str) -> str:
    """Return the language of a file; "" if its name is not that of a known language."""
    name = posixpath.basename(path).lower()
    return _OF_NAME.get(name) or _OF_ENDING.get(name.rpartition(".")[2] if "." in name else "", "")
