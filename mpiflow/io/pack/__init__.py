"""Making data files: rows from arrays, images, tables or text, as sets of sharded HDF5 files.

    source            what it reads                              gives
    source.py         arrays, .npz, a function of a .py file     arrays, or a stream of pieces
    images.py         a folder of images for each class          rows, decoded when they are taken
    idx.py            the files of MNIST and sets like it        a stream
    table.py          CSV                                        a stream
    text.py           text, by a tokenizer                       rows of tokens
    pairs.py          those rows, as BERT trains on them         rows

`rows.py` shuffles rows and divides them into sets, `write.py` writes the sets.
"""

from mpiflow.io.pack.rows import Arrays, Rows
from mpiflow.io.pack.sets import pack, pack_sets
from mpiflow.io.pack.write import Progress, Storage

__all__ = ["Arrays", "Progress", "Rows", "Storage", "pack", "pack_sets"]
