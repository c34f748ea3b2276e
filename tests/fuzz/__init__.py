"""Random programs of what people do around an optimizer: run twice, speculating and waiting for every verdict, and
compared to the bit; what waits is compared with torch's AdamW, too.

    python -m tests.fuzz --programs 10000 --processes 4      many; what fails is cut down to a short program
    python -m tests.fuzz --show 17 > program.json            the program of a seed, to read and to edit
    python -m tests.fuzz --replay program.json               run it
    python -m tests.fuzz --mutants --programs 300            mistakes put in, and how many programs find each

``program`` draws; ``world``, ``model`` and the operations (``training``, ``changes``, ``storage``) are what
programs mean; ``machine`` runs and compares; ``oracle`` asks torch; ``campaign`` does it many times.
"""
