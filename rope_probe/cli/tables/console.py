"""Where tables are written."""

import rich.console


class Console(rich.console.Console):
    """Standard output, in a notebook as well: there rich alone would turn each line of a table into HTML of its own."""

    def __init__(self):
        super().__init__(force_jupyter=False)
