-- Another attempt. now, where the message goes (see `enqueue`), queue, message id, message
-- The worker that let the request down may still be first in line for a wake token, frozen: there are more than one.
enqueue(ARGV[2], ARGV[3], ARGV[4], ARGV[5], WAKE_TOKENS_AGAIN)
return 1
