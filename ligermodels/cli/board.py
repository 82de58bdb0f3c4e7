"""`ligermodels board`: serves a page over the runs of a folder, live while they train."""

import argparse
from pathlib import Path

from ligermodels.cli.flags import Commands, add_command, print_line, whole_number

PORT = 6543


def add_board_command(commands: Commands) -> None:
    parser = add_command(
        commands, "board", run, "show runs in a browser while they train; start, stop and try them", "runs --also data"
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), help="folder of the runs; new ones go there"
    )
    parser.add_argument(
        "--also", type=Path, nargs="+", default=[], metavar="FOLDER",
        help="folders of models and data that the board may use; it reads and starts nothing outside",
    )  # fmt: skip
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; of any other, the printed address has a token"
    )
    parser.add_argument("--port", type=whole_number(0, "a port"), default=PORT, help="0 for any that is free")


def run(args: argparse.Namespace) -> None:
    from ligermodels.board import open_board  # no other command needs it

    open_board([args.folder, *args.also], args.host, args.port, print_line)
