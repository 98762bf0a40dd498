"""Text and images for learners: sharded, shuffled, exactly resumable."""

from decoupled_diloco.data.corpus import Corpus as Corpus
from decoupled_diloco.data.corpus import TextOptions as TextOptions
from decoupled_diloco.data.corpus import open_corpus as open_corpus
from decoupled_diloco.data.image_source import ImageOptions as ImageOptions
from decoupled_diloco.data.image_source import Images as Images
from decoupled_diloco.data.image_source import open_images as open_images
from decoupled_diloco.data.image_source import split_images as split_images
from decoupled_diloco.data.images import ImageIterator as ImageIterator
from decoupled_diloco.data.images import ImagePipeline as ImagePipeline
from decoupled_diloco.data.images import (
  held_out_image_batches as held_out_image_batches,
)
from decoupled_diloco.data.images import (
  train_image_batches as train_image_batches,
)
from decoupled_diloco.data.indexed import IndexedIterator as IndexedIterator
from decoupled_diloco.data.pipeline import TextIterator as TextIterator
from decoupled_diloco.data.pipeline import TextPipeline as TextPipeline
from decoupled_diloco.data.pipeline import held_out_batches as held_out_batches
from decoupled_diloco.data.pipeline import train_batches as train_batches
from decoupled_diloco.data.prefetch import Prefetcher as Prefetcher
from decoupled_diloco.data.prefetch import StatefulIterator as StatefulIterator
from decoupled_diloco.data.tokenizers import ByteTokenizer as ByteTokenizer
from decoupled_diloco.data.tokenizers import FileTokenizer as FileTokenizer
from decoupled_diloco.data.tokenizers import Tokenizer as Tokenizer
from decoupled_diloco.data.tokenizers import open_tokenizer as open_tokenizer
