"""A fuzzer of every function that opens a file: damaged and hostile files, each in a process of its own.

A case is a small valid file (of ``tests/golden``, or made by `fuzz.files.formats`) with one random damage from
`fuzz.files.damage`: bytes that are cut, flipped or exchanged, and contents that are well formed but hostile, such as a
shape of 2⁴⁰, a decompression bomb or 100,000 brackets. `fuzz.files.isolate` opens it in a child process. The file must
be refused with one sentence (`qkv.InputError`), or loaded, within two seconds of processor time and 200 MB, without
warnings, without output, and without any change to the folder. A zip file whose bytes were changed must load with equal
contents or not at all.

    python -m fuzz.files --cases 10000 --seed 0
    python -m fuzz.files --seed 0 --case 1234
"""
