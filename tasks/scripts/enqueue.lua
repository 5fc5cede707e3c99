-- now, where the message goes (see `enqueue`), queue, message id, message
enqueue(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
return 1
