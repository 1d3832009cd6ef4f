# Sourced by scripts/quickstart, scripts/test and .ci/run: from a bare clone to an environment in which
# bitnet_ops is installed (editable) with a CPU torch.
#
#   PYTHON              interpreter to use (default: python3)
#   BITNET_VENV         where the environment goes (default: .venv in the clone)
#   BITNET_TORCH_INDEX  package index to take torch from. Set it to the CPU wheel index named on
#                       pytorch.org when your default index offers a CUDA build (several GB).
#   BITNET_TEST_JOBS    how many tests run at once (default 2)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${BITNET_VENV:-$ROOT/.venv}"
TORCH="torch==2.13.0"
BUILD_TOOLS=("scikit-build-core>=1.1" "pybind11>=3.0" "cmake>=3.25" ninja) # as in pyproject.toml
JOBS="${BITNET_TEST_JOBS:-2}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '[%4ds] %s\n' "$SECONDS" "$*" >&2; }

# missing WHAT APT_PACKAGE DNF_PACKAGE: one line, then stop, with a status by which .ci/run knows it.
missing() {
  local how="install $2 (Debian, Ubuntu) or $3 (Fedora) with your package manager"
  if command -v apt-get >/dev/null; then how="run: apt-get install $2 (with sudo unless root)"; fi
  if command -v dnf >/dev/null; then how="run: dnf install $3 (with sudo unless root)"; fi
  echo "error: $1; $how" >&2
  exit 3
}

check_system() {
  local python="${PYTHON:-python3}" cxx
  read -ra cxx <<<"${CXX:-g++}" # may be two words, as in "ccache g++"
  command -v "$python" >/dev/null || missing "no Python found ($python)" python3 python3
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    missing "expected Python 3.10 or newer, got $("$python" --version 2>&1)" python3 python3
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    missing "Python has no venv module" python3-venv python3
  "$python" -c 'import os, sysconfig as s, sys
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' ||
    missing "no Python headers (Python.h)" python3-dev python3-devel
  command -v "${cxx[0]}" >/dev/null || missing "no C++ compiler found (${cxx[0]})" g++ gcc-c++
  echo '#include <concepts>' | "${cxx[@]}" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ||
    missing "the C++ compiler (${cxx[*]}) cannot compile C++20" g++ gcc-c++
}

# What is installed: the interpreter, torch, and every file that find_arguments choose.
hash_of() {
  (cd "$ROOT" && {
    echo "$ROOT"
    "$VENV/bin/python" --version
    "$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))'
    find pyproject.toml CMakeLists.txt cmake build_backend csrc -type f -not -name '*.pyc' -not -name '*.md' \
      -not -path 'csrc/tests/*' "$@" -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    find python -name '*.py' | LC_ALL=C sort
  }) | sha256sum | cut -d' ' -f1
}

# Everything that an edit of makes a new build necessary; Python files are read from the tree, where
# the editable install looks for those that were there when it was made: their names count.
build_hash() { hash_of; }

# The same without what libbitnet_kernels.so alone is made of: scripts/quick builds that by itself.
upper_hash() {
  hash_of -not -path 'csrc/kernels/isa*' -not \
    \( -regex 'csrc/\(engine\|kernels\|runtime\|format\)/.*' -regex '.*[.]\(cpp\|inl\)' \)
}

# torch's download is shown on a terminal, which takes as long as the build.
pip_torch() {
  local quiet=(-q)
  if [ -t 2 ]; then quiet=(); fi
  "$VENV/bin/python" -m pip install "${quiet[@]}" ${BITNET_TORCH_INDEX:+--index-url "$BITNET_TORCH_INDEX"} "$TORCH"
}

# `python -m pip`, because the first line of bin/pip breaks when the clone is moved.
pip_install() { "$VENV/bin/python" -m pip install -q "$@"; }

# compile_count: of a build's output on standard input, how many files of how many are compiled: on a
# terminal on one line that moves, elsewhere a line every ten seconds. What is none of that is kept in
# the file $1.
compile_count() {
  local line told=-10
  while IFS= read -r line; do
    if ! [[ "$line" =~ \[([0-9]+)/([0-9]+)\] ]]; then
      printf '%s\n' "$line" >>"$1"
    elif [ -t 2 ]; then
      printf '\r[%4ds] compiled %s of %s ' "$SECONDS" "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" >&2
    elif ((SECONDS - told >= 10 || BASH_REMATCH[1] == BASH_REMATCH[2])); then
      told="$SECONDS"
      say "compiled ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]}"
    fi
  done
  if [ -t 2 ]; then echo >&2; fi
}

# install_project EXTRAS: with a count of what is compiled; the end of the output if it fails.
install_project() {
  local log command=("$VENV/bin/python" -m pip install -e "$ROOT$1" --no-build-isolation -v)
  log="$(mktemp)"
  if ! PATH="$VENV/bin:$PATH" "${command[@]}" 2>&1 | compile_count "$log"; then
    tail -n 60 "$log" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

# wider_of A B: the later one of two of "", "[server]", "[test]" and "[test,dev]"; each has what those
# before it bring.
wider_of() {
  local extras
  for extras in "[test,dev]" "[test]" "[server]"; do
    case "$extras" in "$1" | "$2") echo "$extras" && return ;; esac
  done
}

# setup_project [EXTRAS]: as of wider_of. Does nothing when nothing changed.
setup_project() {
  local extras stamp="$VENV/.bitnet-stamp" hash old_hash="" old_upper="" old_extras=""
  if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
    check_system
    say "making the environment $VENV"
    "${PYTHON:-python3}" -m venv "$VENV"
  fi
  if ! "$VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
    say "installing the build tools and $TORCH (a download of 200 MB)"
    pip_install "${BUILD_TOOLS[@]}"
    pip_torch
  fi
  hash="$(build_hash)"
  if [ -f "$stamp" ]; then read -r old_hash old_upper old_extras <"$stamp" || true; fi
  extras="$(wider_of "${1:-}" "$old_extras")" # keep what is installed
  if [ "$hash" = "$old_hash" ] && [ "$extras" = "$old_extras" ]; then return 0; fi
  check_system
  say "building and installing bitnet-ops$extras (minutes the first time)"
  rm -f "$stamp"
  install_project "$extras"
  echo "$hash $(upper_hash) $extras" >"$stamp"
}

# package_tree: the folder in which the installed package was built; nothing if it is gone.
package_tree() {
  local tag
  tag="$("$VENV/bin/python" -c 'import sys; print(*sys.version_info[:2], sep="")')"
  find "$ROOT/build" -maxdepth 2 -path "*/cp$tag-*/CMakeCache.txt" -printf '%h\n' -quit
}

# ctest_in FOLDER CMAKE_OPTION...: configure and build bitnet_tests (csrc/tests) there and let CTest run
# it, suite by suite. Needs cmake and ninja on PATH.
ctest_in() {
  local build="$1" log
  shift
  cmake -S "$ROOT" -B "$build" -G Ninja -DBITNET_BUILD_TESTS=ON "$@" >/dev/null
  log="$(cmake --build "$build" --parallel --target bitnet_tests 2>&1)" || { echo "$log" >&2; return 1; }
  ctest --test-dir "$build" --output-on-failure --no-tests=error --parallel "$JOBS"
}

# ctest_alone NAME CMAKE_OPTION...: the same in build/NAME, without torch or Python.
ctest_alone() {
  ctest_in "$ROOT/build/$1" -DBITNET_KERNELS_ONLY=ON -DBITNET_WERROR="${BITNET_WERROR:-OFF}" "${@:2}"
}

# compile_alone FOLDER CMAKE_OPTION...: that the kernel library compiles, without tests, in a minute.
compile_alone() {
  local build="$1" log
  cmake -S "$ROOT" -B "$build" -G Ninja -DBITNET_KERNELS_ONLY=ON -DBITNET_WERROR="${BITNET_WERROR:-OFF}" \
    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 "${@:2}" >/dev/null
  log="$(cmake --build "$build" --parallel --target bitnet_kernels 2>&1)" || { echo "$log" >&2; return 1; }
}

# instructions_of_kernels: by day, leaves out of what suites_at_once runs all but the best table, and what kernels make of
# special values, of sums at their bounds and of long rows: arithmetic that a CPU does not change.
VALUES_OF_KERNELS=()
instructions_of_kernels() {
  [ "${BITNET_CI_ALL:-0}" != 1 ] || return 0
  export BITNET_TEST_TABLES=best
  VALUES_OF_KERNELS=(-kernels_accuracy. -kernels_convert. -worst_cases -planted_values -planted_scales -longest_sums)
}

# suites_at_once PROGRAM... -- FILTER...: the suites of a bitnet_tests that the filters choose (see its main.cpp), each in
# a process, JOBS at once.
suites_at_once() {
  local program=() filter suites
  while [ "$1" != -- ]; do program+=("$1") && shift; done
  shift
  suites="$("${program[@]}" --list "$@" | sed 's/[.].*/./' | uniq)"
  for filter in "$@"; do [ "${filter#-}" = "$filter" ] || program+=("$filter"); done
  # shellcheck disable=SC2086  # names without spaces
  each_of "${program[@]}" -- $suites
}

# each_of COMMAND... -- FILE...: COMMAND FILE for each, JOBS at once, what one prints in one piece; fails
# if one does.
each_of() {
  local command=()
  while [ "$1" != -- ]; do command+=("$1") && shift; done
  shift
  # shellcheck disable=SC2016  # the inner shell expands
  printf '%s\0' "$@" | xargs -0 -n 1 -P "$JOBS" bash -c \
    'text="$("$@" 2>&1)"; status=$?; printf "%s\n" "$text"; exit $status' _ "${command[@]}"
}
