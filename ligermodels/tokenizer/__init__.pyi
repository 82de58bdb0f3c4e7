from ligermodels.tokenizer.tokenizer import Tokenizer as Tokenizer
from ligermodels.tokenizer.tokenizer import check_vocabulary as check_vocabulary
