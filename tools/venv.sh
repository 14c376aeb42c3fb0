#!/bin/sh
# The virtual environment of the Makefile, and a sentence with the cure for whatever is missing.
#
#   venv.sh make VENV             makes it with $PYTHON and installs what building and running need
#   venv.sh install VENV WORDS    pip install WORDS
#   venv.sh editable VENV         installs this tree in it, so that edits count at once
#   venv.sh say-torch 0|1         says what TORCH=0 leaves out
set -eu

fail() {
    echo "flatshard: $*" >&2
    exit 1
}

version_check='import sys; sys.exit(0 if sys.version_info >= (3, 10) else 1)'

make_venv() {
    python=${PYTHON:-python3}
    command -v "$python" >/dev/null 2>&1 ||
        fail "there is no '$python'. Install Python 3.10 or newer, or name one: make PYTHON=python3.12"
    "$python" -c "$version_check" ||
        fail "$("$python" --version 2>&1) is too old: 3.10 or newer is needed; name one: make PYTHON=python3.12"
    [ -w . ] || fail "no permission to write in $(pwd): the environment, the build and the runs go there. Clone to a folder of yours"
    if [ ! -x "$1/bin/python" ] || ! "$1/bin/python" -c "$version_check" 2>/dev/null; then
        "$python" -c 'import venv, ensurepip' 2>/dev/null ||
            fail "$python has no venv module. Install it (Debian, Ubuntu: apt install python3-venv), or name another Python: make PYTHON=..."
        rm -rf "$1"
        echo "flatshard: making $1 with $("$python" --version 2>&1)"
        "$python" -m venv "$1" || fail "$python could not make a virtual environment in $1; its words are above"
    fi
    # shellcheck disable=SC2046 # one word a requirement
    install "$1" $("$1/bin/python" - <<'PYTHON'
import re

# tomllib is there from Python 3.11; these two lists are one line each.
text = open("pyproject.toml", encoding="utf-8").read()
for key in ("requires", "dependencies"):
    line = re.search(rf"^{key} = \[(.*)\]$", text, re.M).group(1)
    print(*re.findall(r'"([^"]+)"', line), end=" ")
PYTHON
    )
}

install() {
    venv=$1
    shift
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@" ||
        fail "pip could not install $*; its words are above. It needs a network, or a package index set in pip's configuration"
}

# The extension has been compiled in place; this only makes the package and its command known. Done
# again when pyproject.toml changed.
editable() {
    [ "$1/editable" -nt pyproject.toml ] && [ "$1/editable" -nt "$1/made" ] && return
    install "$1" --no-build-isolation --no-deps --editable .
    touch "$1/editable"
}

say_torch() {
    [ "$1" != 0 ] || echo "flatshard: TORCH=0: comparisons with torch and transformers are left out"
}

action=$1
shift
case $action in
    make) make_venv "$@" ;;
    install) install "$@" ;;
    editable) editable "$@" ;;
    say-torch) say_torch "$@" ;;
    *) fail "unknown action $action" ;;
esac
