#!/bin/sh
# Compiles the native core into a folder: core.sh FOLDER
set -eu
export PATH=/opt/tools/bin:$PATH
cmake -S . -B /tmp/core -G Ninja
cmake --build /tmp/core
cmake --install /tmp/core --prefix "$1" --strip
