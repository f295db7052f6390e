/* A page opened from a disk may not start a Worker, which the search runs in. There, a hidden frame does its work. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      script.src = String(url)
      script.onload = () => {
        this.waiting.forEach(data => this.deliver(data))
        this.waiting = null
      }
      this.inside.document.body.appendChild(script)
    }
    deliver(data) {
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.deliver(data)
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
