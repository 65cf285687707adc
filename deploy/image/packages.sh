#!/bin/sh
# Installs packages into a folder: packages.sh FOLDER REQUIREMENT...
set -eu
folder=$1
shift
test -d /opt/pip || python3 -m venv /opt/pip
/opt/pip/bin/pip install --target "$folder" "$@"
# Commands would name this stage's interpreter.
rm -rf "$folder/bin"
