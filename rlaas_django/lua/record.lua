--[[
  Adds statistics to one key, keeps it within its maximum size, and sets its expiry.
  Version  3

  KEYS   the key
  ARGV   now (not used; it is the first argument of every script), type, TTL in s, maximum size, then for the type
           counts   field and increment of a HASH
           ranks    member and increment of a ZSET; the highest are kept
           levels   member and score of a ZSET; the highest are kept
           lines    items of a LIST, pushed to the front; the newest are kept
]]
local call, key, type, most = redis.call, KEYS[1], ARGV[2], ARGV[4] + 0

if type == "lines" then
  for i = 5, #ARGV do
    call("LPUSH", key, ARGV[i])
  end
  call("LTRIM", key, 0, most - 1)
else
  for i = 5, #ARGV, 2 do
    if type == "counts" then
      call("HINCRBY", key, ARGV[i], ARGV[i + 1])
    else
      call(type == "ranks" and "ZINCRBY" or "ZADD", key, ARGV[i + 1], ARGV[i])
    end
  end
  if type ~= "counts" then
    call("ZREMRANGEBYRANK", key, 0, -most - 1)
  end
end
call("EXPIRE", key, ARGV[3])
return 1
